"""Cached KV through the whole stack: answers stay what they were, and no picture is encoded twice."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stack.conftest import noise_png
from triptych import errors
from triptych.client import Answer, AsyncClient, Options, assistant, user
from triptych.config import RouterSettings, TritonSettings, WorkerSettings
from triptych.processes import ServiceSpec
from triptych.rpc.channel import open_channel
from triptych.rpc.health import is_serving
from triptych.stack import Stack, StackSettings, plan_stack
from triptych.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.integration

OPTIONS = Options(max_tokens=6, ignore_eos=True, timeout_s=60)
FIRST, OTHER = "what is in the middle?", "how many shapes are there?"
PICTURES = 5
CACHED = {inference_pb2.FEATURE_SOURCE_KV_CACHE}


@dataclass
class Rig:
    """Triton and a router that live through the test, and workers that do not."""

    settings: StackSettings
    worker_spec: ServiceSpec

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Stack]:
        stack = Stack([self.worker_spec], lambda name, line: None)
        try:
            await stack.start()
            await self._settle()
            yield stack
        finally:
            await stack.stop()

    async def _settle(self) -> None:
        """Waits until the router has found the new worker: until it learns that a picture is cached."""
        while not await is_serving(self.settings.router_address):
            await asyncio.sleep(0.1)
        async with AsyncClient(self.settings.router_address) as client:
            picture = noise_png(1000 + time.monotonic_ns() % 1000)
            while True:
                with contextlib.suppress(errors.Unavailable):
                    if sources(await client.ask(picture, FIRST, options=OPTIONS)) == CACHED:
                        return
                await asyncio.sleep(0.1)

    async def report(self) -> worker_pb2.CacheReport:
        async with open_channel(self.settings.router.worker) as channel:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.InspectCache(worker_pb2.InspectCacheRequest(), timeout=10)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    # The device holds two dialogues of five, the host tier all; the router keeps no features that could step in.
    worker = WorkerSettings(kv_blocks=16, kv_host_bytes=4 << 20, kv_disk_dir=tmp_path, kv_prefetch_timeout_s=10)
    settings = StackSettings(TritonSettings(), worker, RouterSettings(encoder_cache_bytes=0)).on_free_ports()
    specs = {spec.name: spec for spec in plan_stack(settings)}
    front = Stack([specs["triton"], specs["router"]], lambda name, line: None)
    starting = asyncio.create_task(front.start())
    try:
        rig = Rig(settings, specs["worker"])
        first = Stack([specs["worker"]], lambda name, line: None)
        await first.start()  # The router is not ready without a worker.
        await starting
        await first.stop()
        yield rig
    finally:
        await front.stop()


def sources(answer: Answer) -> set[int]:
    return {image.source for image in answer.started.images}


async def test_answers_with_kv_from_device_host_and_disk_are_those_of_a_cold_run(rig: Rig) -> None:
    pictures = [noise_png(seed) for seed in range(PICTURES)]
    async with AsyncClient(rig.settings.router_address) as client:

        async def second_turn(number: int, opening: str) -> Answer:
            turns = [user(pictures[number], FIRST), assistant(opening), user("and on the left?")]
            return await client.chat(turns, OPTIONS)

        async with rig.worker() as worker:
            openings, others, turns = [], [], []
            for number, picture in enumerate(pictures):
                cold = await client.ask(picture, FIRST, options=OPTIONS)
                assert sources(cold) == {inference_pb2.FEATURE_SOURCE_ENCODER}
                openings.append(cold.text)
                other = await client.ask(picture, OTHER, options=OPTIONS)
                turn = await second_turn(number, cold.text)
                assert sources(other) == sources(turn) == CACHED
                others.append(other.text)
                turns.append(turn.text)
            for number, picture in enumerate(pictures):
                other = await client.ask(picture, OTHER, options=OPTIONS)
                turn = await second_turn(number, openings[number])
                assert sources(other) == sources(turn) == CACHED
                assert (other.text, turn.text) == (others[number], turns[number])
            report = await rig.report()
            assert any(move.way == "host_to_device" and move.blocks for move in report.moves)
            await asyncio.sleep(1)  # Lets the last blocks reach the disk.
            os.kill(worker.pid_of("worker"), signal.SIGKILL)
            await worker.wait()
        async with rig.worker():
            for number, picture in enumerate(pictures):
                other = await client.ask(picture, OTHER, options=OPTIONS)
                turn = await second_turn(number, openings[number])
                assert sources(other) == sources(turn) == CACHED
                assert (other.text, turn.text) == (others[number], turns[number])
            report = await rig.report()
            assert any(move.way == "disk_to_host" and move.blocks for move in report.moves)
            async with open_channel(rig.settings.router.worker) as channel:
                stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                for number, picture in enumerate(pictures):
                    await stub.DropCached(worker_pb2.DropCachedRequest(everything=True))
                    other = await client.ask(picture, OTHER, options=OPTIONS)
                    await stub.DropCached(worker_pb2.DropCachedRequest(everything=True))
                    turn = await second_turn(number, openings[number])
                    assert sources(other) == sources(turn) == {inference_pb2.FEATURE_SOURCE_ENCODER}
                    assert (other.text, turn.text) == (others[number], turns[number])
