"""A gateway for the page alone: its answers are scripted, so that slowness and failure come when a test wants them."""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from triptych.gateway.page import SystemView, page_router
from triptych.gateway.page.view import ModelCard, SystemState, WorkerState
from triptych.ports import free_ports

JAEGER = "http://jaeger.example:16686"

REPORT: dict[str, Any] = {
    "request_id": "request-1",
    "trace_id": "0af7651916cd43dd8448eb211c80319c",
    "images": [{"width": 448, "height": 448, "encoded_side": 112, "visual_tokens": 64, "source": "encoder"}],
    "timings": {
        "intake": 0.0012,
        "preprocess": 0.0063,
        "encode": 0.0421,
        "queue": 0.0031,
        "prefill": 0.0182,
        "decode": 0.0354,
        "time_to_first_token": 0.0733,
        "total": 0.1101,
    },
    "usage": {"text_tokens": 14, "visual_tokens": 64, "cached_tokens": 0, "output_tokens": 6},
    "degradations": [],
}

Step = str | bytes | float
"""A piece of the answer's text, raw bytes of the stream, or seconds to wait."""


@dataclass(frozen=True, slots=True)
class Scripted:
    """One answer.

    Attributes:
        steps: What the stream does, in order; after them it ends as a good one does unless `broken`.
        report: The `triptych` member of the last chunk.
        status: Anything but 200 answers `error` as JSON.
        byte_by_byte: Sends each byte by itself.
    """

    steps: Sequence[Step] = ("in the ", "middle")
    report: dict[str, Any] = field(default_factory=lambda: REPORT)
    finish_reason: str = "stop"
    broken: bool = False
    status: int = 200
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    byte_by_byte: bool = False

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the stream's bytes."""
        for step in self.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, bytes):
                yield step
            else:
                yield event({"choices": [{"index": 0, "delta": {"content": step}, "finish_reason": None}]})
        if not self.broken:
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            yield event({"choices": [], "triptych": self.report})
            yield b"data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> bytes:
    """Returns a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


class ScriptedView(SystemView):
    """Says what a test wants it to say."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", None, lambda: 0)
        self.card: ModelCard | None = ModelCard("demo", 512, 112, 64, 4)
        self.seen = SystemState(
            ready=True,
            in_flight=3,
            worker=WorkerState(waiting=1, running=2, total_blocks=1024, used_blocks=96, cached_blocks=410),
            worker_known=True,
        )

    async def state(self) -> SystemState:
        return self.seen

    async def model(self) -> ModelCard | None:
        return self.card


class StubGateway:
    """The page with scripted answers behind it.

    Attributes:
        answers: What the next requests get; an empty script gives good answers.
        requests: Bodies and headers of the requests so far.
        left: Set when a client went away before its answer ended.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.view = ScriptedView()
        self.answers: deque[Scripted] = deque()
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.left = threading.Event()

    def app(self, jaeger_url: str | None = JAEGER) -> FastAPI:
        """Returns the application."""
        app = FastAPI(openapi_url=None)
        app.include_router(page_router(self.view, jaeger_url))

        @app.post("/v1/chat/completions")
        async def completions(request: Request) -> Response:
            self.requests.append((await request.json(), dict(request.headers)))
            scripted = self.answers.popleft() if self.answers else Scripted()
            if scripted.status != 200:
                return JSONResponse({"error": scripted.error}, scripted.status, headers=scripted.headers)
            return StreamingResponse(self._watched(scripted), media_type="text/event-stream")

        return app

    async def _watched(self, scripted: Scripted) -> AsyncIterator[bytes]:
        ended = False
        try:
            async for data in scripted.stream():
                for part in [data[i : i + 1] for i in range(len(data))] if scripted.byte_by_byte else [data]:
                    yield part
                    if scripted.byte_by_byte:
                        await asyncio.sleep(0)
            ended = True
        finally:
            if not ended:
                self.left.set()


@contextmanager
def running_stub() -> Iterator[StubGateway]:
    """Yields a stub gateway that listens on a free port."""
    port = free_ports(1)[0]
    stub = StubGateway(f"http://localhost:{port}")
    server = uvicorn.Server(uvicorn.Config(stub.app(), host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the stub gateway did not start"
            time.sleep(0.02)
        yield stub
    finally:
        server.should_exit = True
        thread.join(timeout=10)
