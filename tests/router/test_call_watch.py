import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.router.fakes import FakeWorker, start_worker
from triptych.errors import StageTimeout, Unavailable
from triptych.router.call_watch import CallWatch
from triptych.rpc.channel import open_channel
from triptych.v1 import worker_pb2, worker_pb2_grpc

LATE = StageTimeout("late")


@pytest_asyncio.fixture
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture
async def call(worker: FakeWorker) -> AsyncIterator[Any]:
    server, port = await start_worker(worker)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel).Generate(worker_pb2.WorkerGenerateRequest())
    await server.stop(None)


async def test_a_reader_who_takes_longer_than_the_deadline_loses_nothing(call: Any) -> None:
    watch = CallWatch(call, lambda: None)
    kinds = []
    while isinstance(event := await watch.read(), worker_pb2.WorkerGenerateResponse):
        kinds.append(event.WhichOneof("event"))
        watch.expect(0.05, LATE)
        await asyncio.sleep(0.15)
    assert kinds == ["started", "chunk", "chunk", "chunk", "finished"]
    watch.close()


async def test_a_read_beyond_the_deadline_raises_what_was_said_and_ends_the_call(call: Any, worker: FakeWorker) -> None:
    worker.before_first = lambda: asyncio.sleep(3600)
    watch = CallWatch(call, lambda: None)
    watch.expect(60, StageTimeout("not this one"))
    assert (await watch.read()).WhichOneof("event") == "started"
    watch.expect(0.05, LATE)
    async with asyncio.timeout(2):
        with pytest.raises(StageTimeout, match="late"):
            await watch.read()
    assert call.cancelled()
    watch.close()


async def test_a_peer_that_is_dead_is_noticed_before_the_deadline(call: Any, worker: FakeWorker) -> None:
    worker.before_first = lambda: asyncio.sleep(3600)
    watch = CallWatch(call, lambda: Unavailable("dead"))
    watch.expect(60, LATE)
    async with asyncio.timeout(2):
        with pytest.raises(Unavailable, match="dead"):
            while True:
                await watch.read()
    watch.close()


async def test_a_reader_who_is_cancelled_is_cancelled(call: Any, worker: FakeWorker) -> None:
    worker.before_first = lambda: asyncio.sleep(3600)
    watch = CallWatch(call, lambda: None)
    await watch.read()
    reading = asyncio.create_task(watch.read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    watch.close()
