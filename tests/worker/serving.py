"""A worker over loopback gRPC and a client for it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.worker.checkpoints import Reference
from tests.worker.driving import identity_of
from triptych import tensors
from triptych.config import WorkerSettings
from triptych.errors import TriptychError
from triptych.rpc.channel import open_channel
from triptych.rpc.status import from_rpc_error
from triptych.v1 import generation_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from triptych.worker.engine.runner import Outcome
from triptych.worker.engine.scheduler import StepPlan
from triptych.worker.server import SERVICE_NAME, Worker

QUESTION = "what color is the big round thing on the left side of the picture"


def settings_for(folder: Path, **overrides: Any) -> WorkerSettings:
    values: dict[str, Any] = {"model_dir": folder, "device": "cpu", "threads": 1, "kv_blocks": 256, **overrides}
    # Port 0 takes any free port; the settings refuse it for real use.
    return WorkerSettings(**values).model_copy(update={"port": 0})


def slow_down(worker: Worker, step_s: float) -> None:
    """Makes each of the engine's steps take `step_s` longer, so that a test can do something in the middle."""
    start = worker.model.engine.runner.start

    def slowly(plan: StepPlan) -> Callable[[], list[Outcome]]:
        time.sleep(step_s)
        return start(plan)

    worker.model.engine.runner.start = slowly  # type: ignore[method-assign]


class Client:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.channel = open_channel(f"127.0.0.1:{worker.port}")
        self.stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def answer(self, request: worker_pb2.WorkerGenerateRequest) -> list[worker_pb2.WorkerGenerateResponse]:
        """Returns all events of a generation. Raises the error that its status stands for."""
        try:
            return [event async for event in self.stub.Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def refusal(self, request: worker_pb2.WorkerGenerateRequest) -> TriptychError:
        with pytest.raises(TriptychError) as caught:
            await self.answer(request)
        return caught.value

    async def settle(self) -> None:
        """Waits until the engine has nothing to do and no draft waits, and checks the books."""
        deadline = time.monotonic() + 10
        while await self.worker.engine.call(lambda engine: engine.has_work) or len(self.worker.drafts):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await self.worker.engine.call(lambda engine: engine.check_integrity())
        assert (await self.worker.engine.call(lambda engine: engine.load())).used_blocks == 0

    async def health(self, service: str = SERVICE_NAME) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

    async def becomes(self, status: int) -> None:
        """Waits until the worker's health is `status`."""
        deadline = time.monotonic() + 10
        while await self.health() != status:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def image(reference: Reference, seed: int, features: bool = True) -> worker_pb2.PromptImage:
    rows = reference.features(reference.picture(seed)).numpy()
    tensor = tensors.to_proto(rows) if features else None
    return worker_pb2.PromptImage(identity=identity_of(seed), token_count=len(rows), features=tensor)


def request(*images: worker_pb2.PromptImage, text: str = QUESTION, **fields: Any) -> worker_pb2.WorkerGenerateRequest:
    parts = [worker_pb2.PromptPart(image_index=index) for index in range(len(images))]
    message = worker_pb2.PromptMessage(role=inference_pb2.ROLE_USER, parts=[*parts, worker_pb2.PromptPart(text=text)])
    fields.setdefault("stopping", generation_pb2.StoppingParameters(max_tokens=12, ignore_eos=True))
    return worker_pb2.WorkerGenerateRequest(
        request_id="test", prompt=worker_pb2.Prompt(messages=[message], images=images), **fields
    )


def text_of(events: list[worker_pb2.WorkerGenerateResponse]) -> str:
    return "".join(event.chunk.text for event in events)
