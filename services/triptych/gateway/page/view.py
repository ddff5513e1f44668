"""The system as the page shows it: who answers, how much waits and runs, how full the KV cache is."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from triptych.rpc.channel import open_channel
from triptych.rpc.health import answers_serving
from triptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

ANSWER_TIMEOUT_S = 1.0
"""Seconds after which a service counts as not answering."""
FRESH_S = 0.5
"""Seconds for which a state is handed out again, so that many open pages cost no more than one."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, as far as the page needs it.

    Attributes:
        name: What a request says as `model`.
        context_tokens: Most prompt and output tokens together.
        native_image_side: Side of a picture at high resolution, in pixels.
        native_visual_tokens: Tokens of a picture at high resolution.
        max_images: Most pictures in one request, earlier turns included.
    """

    name: str
    context_tokens: int
    native_image_side: int
    native_visual_tokens: int
    max_images: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's load; blocks are KV blocks of the device pool.

    Attributes:
        waiting: Requests before their first prefill chunk.
        running: Requests in prefill or decode, which share each step.
        total_blocks: Size of the pool.
        used_blocks: Held by running requests.
        cached_blocks: Kept for reuse by later requests, evicted when needed.
    """

    waiting: int
    running: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class SystemState:
    """One look at the system.

    Attributes:
        ready: Whether the router says that a request would be served.
        in_flight: Requests in this gateway.
        worker: None when no worker's address is known or it does not answer.
        worker_known: Whether a worker's address is known.
    """

    ready: bool
    in_flight: int
    worker: WorkerState | None
    worker_known: bool


class SystemView:
    """Looks at router and worker when asked. Connections open at the first look, in the running event loop."""

    def __init__(self, router: str, worker: str | None, in_flight: Callable[[], int]) -> None:
        self._router = router
        self._worker = worker
        self._in_flight = in_flight
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._looking = asyncio.Lock()
        self._seen: tuple[float, SystemState] | None = None

    async def state(self) -> SystemState:
        """Returns a state at most FRESH_S old, within about ANSWER_TIMEOUT_S, whoever is down."""
        async with self._looking:
            if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
                ready, worker = await asyncio.gather(self._ready(), self._load())
                state = SystemState(ready, self._in_flight(), worker, worker_known=self._worker is not None)
                self._seen = (time.monotonic(), state)
            return self._seen[1]

    async def model(self) -> ModelCard | None:
        """Returns the model, or None while the router or what stands behind it does not answer."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(self._router))
        with contextlib.suppress(grpc.aio.AioRpcError):
            model = await stub.GetModel(inference_pb2.GetModelRequest(), timeout=ANSWER_TIMEOUT_S)
            return ModelCard(
                name=model.name,
                context_tokens=model.context_tokens,
                native_image_side=model.native_image_side,
                native_visual_tokens=model.native_visual_tokens,
                max_images=model.max_images,
            )
        return None

    async def close(self) -> None:
        """Ends all connections."""
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _ready(self) -> bool:
        return await answers_serving(self._channel(self._router), ANSWER_TIMEOUT_S)

    async def _load(self) -> WorkerState | None:
        if self._worker is None:
            return None
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel(self._worker))
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=ANSWER_TIMEOUT_S)
        try:
            load = await call.read()  # The first message comes at once.
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
        if not isinstance(load, worker_pb2.WorkerLoad):  # The end of the stream.
            return None
        return WorkerState(load.waiting, load.running, load.total_blocks, load.used_blocks, load.cached_blocks)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]
