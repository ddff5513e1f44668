"""A real router over loopback, with a fake encoder and a fake worker behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from tests.router.fakes import FakeEncoder, FakeWorker, start_worker
from triptych.config import RouterSettings
from triptych.errors import TriptychError
from triptych.router.server import Router, run_router
from triptych.rpc.channel import open_channel
from triptych.rpc.status import from_rpc_error
from triptych.v1 import inference_pb2, inference_pb2_grpc


@dataclass
class Rig:
    """Everything a test of the router touches."""

    router: Router
    encoder: FakeEncoder
    draft_encoder: FakeEncoder
    worker: FakeWorker
    worker_server: grpc.aio.Server
    worker_port: int
    channel: grpc.aio.Channel

    @property
    def stub(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def answer(self, request: inference_pb2.GenerateRequest, **call: Any) -> "Answer":
        """Returns a whole answer; raises the TriptychError that the status stands for."""
        answer = Answer()
        try:
            async for event in self.stub.Generate(request, **call):
                answer.add(event)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def failure(self, request: inference_pb2.GenerateRequest, **call: Any) -> TriptychError:
        """Returns the error of a request that must fail."""
        with pytest.raises(TriptychError) as caught:
            await self.answer(request, **call)
        return caught.value


class Answer:
    """The events of one generation."""

    def __init__(self) -> None:
        self.started = inference_pb2.Started()
        self.finished = inference_pb2.Finished()
        self.text = ""
        self.order: list[str] = []

    def add(self, event: inference_pb2.GenerateResponse) -> None:
        kind = str(event.WhichOneof("event"))
        self.order.append(kind)
        if kind == "started":
            self.started = event.started
        elif kind == "finished":
            self.finished = event.finished
        else:
            self.text += event.chunk.text


@pytest.fixture
def settings() -> dict[str, Any]:
    """Knobs of the router; a test overrides them with its own fixture or indirectly."""
    return {}


@pytest.fixture
async def rig(settings: dict[str, Any]) -> AsyncIterator[Rig]:
    encoder, draft_encoder, worker = FakeEncoder(), FakeEncoder(), FakeWorker()
    assert draft_encoder.spec is not None
    draft_encoder.spec = replace(draft_encoder.spec, fingerprint="draft")
    server, port = await start_worker(worker)
    knobs = RouterSettings(worker=f"127.0.0.1:{port}", **settings)
    async with (
        run_router(knobs, encoder, port=0, draft_encoder=draft_encoder) as router,
        open_channel(f"127.0.0.1:{router.port}") as channel,
    ):
        await until(lambda: router.readiness.ready)
        rig = Rig(router, encoder, draft_encoder, worker, server, port, channel)
        try:
            yield rig
            await until(lambda: router.pipeline.admission.requests == 0)
            router.pipeline.check_integrity()
            assert encoder.running == draft_encoder.running == 0
        finally:
            await rig.worker_server.stop(None)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for a condition, failing after timeout_s."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
