"""Real HTTP servers that behave, or misbehave, as a test asks."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.StreamResponse], Awaitable[None]]


@dataclass
class OpenAiServer:
    """Streams `words`, `delay_s` apart; a test may replace what a request gets."""

    words: list[str] = field(default_factory=lambda: ["a ", "b ", "c "])
    delay_s: float = 0.0
    with_usage: bool = True
    owner: str = "nobody"
    status: int = 200
    capacity: int | None = None
    behave: Behaviour | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": self.owner}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.behave is not None:
                await self.behave(response)
            else:
                await self._answer(response)
        finally:
            self.running -= 1
        return response

    async def _answer(self, response: web.StreamResponse) -> None:
        await response.write(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
        for word in self.words:
            await asyncio.sleep(self.delay_s)
            await response.write(piece(word))
        await response.write(event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]))
        if self.with_usage:
            await response.write(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": len(self.words)}))
        await response.write(b"data: [DONE]\n\n")


def event(**fields: Any) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **fields}).encode() + b"\n\n"


def piece(text: str) -> bytes:
    """Returns an event with text."""
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


@asynccontextmanager
async def serving(server: OpenAiServer) -> AsyncIterator[OpenAiServer]:
    """Serves on a free loopback port; `server.url` is set."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
