"""Two real Tritons behind one scheduler: one is killed, hangs, and comes back; shared memory is used and given back."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.triton.conftest import settings_for
from triptych.config import TritonSettings
from triptych.triton.server import TritonServer
from triptych.vision.dispatcher import ScheduledEncoder
from triptych.vision.encoder import Features, TritonEncoder
from triptych.vision.pool import EncoderPool
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import Limits

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMITS = Limits(pixel_budget=16 * 56 * 56, max_inflight=2, batch_timeout_s=0.005, lift_s=1.0)


@pytest.fixture(scope="module")
def settings_of_two(exported: Path) -> list[TritonSettings]:
    return [settings_for(exported, control_mode="none") for _ in range(2)]


@pytest.fixture(scope="module")
def servers(settings_of_two: list[TritonSettings]) -> Iterator[list[TritonServer]]:
    servers = [TritonServer(settings, die_with_parent=True) for settings in settings_of_two]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
async def encoder(
    settings_of_two: list[TritonSettings], servers: list[TritonServer], regions: Callable[[], set[str]]
) -> AsyncIterator[ScheduledEncoder]:
    endpoints = [
        TritonEncoder(f"127.0.0.1:{settings.grpc_port}", "vision", metrics_address=f"127.0.0.1:{settings.metrics_port}")
        for settings in settings_of_two
    ]
    encoder = ScheduledEncoder(EncoderPool(endpoints), LIMITS, 10**6, 1000)
    assert await encoder.refresh(5.0)
    assert all(endpoint.ready for endpoint in endpoints)
    yield encoder
    encoder.check_integrity()
    await encoder.close()
    assert not regions()


def picture(number: int) -> Pixels:
    return np.random.default_rng(number).standard_normal((3, 56, 56)).astype(np.float32)


async def encode_all(encoder: ScheduledEncoder, count: int, timeout_s: float = 30.0) -> list[Features]:
    return list(await asyncio.gather(*(encoder.encode(picture(number), timeout_s) for number in range(count))))


def batches(encoder: ScheduledEncoder, settings: TritonSettings) -> float:
    """Returns how many batches a Triton has finished."""
    labels = {"encoder": f"127.0.0.1:{settings.grpc_port}"}
    return encoder._metrics.registry.get_sample_value("mm_vision_batch_seconds_count", labels) or 0.0


async def test_both_are_used_and_shared_memory_gives_the_same_features_as_bytes(
    encoder: ScheduledEncoder, settings_of_two: list[TritonSettings], regions: Callable[[], set[str]]
) -> None:
    before = regions()
    shared = await encode_all(encoder, 60)
    assert len(regions() - before) >= 2
    assert all(batches(encoder, settings) > 0 for settings in settings_of_two)
    plain = TritonEncoder(f"127.0.0.1:{settings_of_two[0].grpc_port}", "vision", shared_memory=False)
    assert await plain.refresh(5.0)
    version = max(plain.versions)
    for number in range(0, 60, 7):
        (features,) = await plain.run([picture(number)], version, 10.0)
        np.testing.assert_allclose(features, shared[number], rtol=1e-4, atol=1e-5)
    await plain.close()


async def test_a_triton_that_cannot_open_shared_memory_gets_bytes(
    encoder: ScheduledEncoder,
    settings_of_two: list[TritonSettings],
    monkeypatch: pytest.MonkeyPatch,
    regions: Callable[[], set[str]],
) -> None:
    endpoint = TritonEncoder(f"127.0.0.1:{settings_of_two[0].grpc_port}", "vision")
    assert await endpoint.refresh(5.0)
    register = endpoint._client.register_system_shared_memory

    async def elsewhere(name: str, key: str, *rest: object, **more: object) -> object:
        return await register(name, f"{key}-on-another-host", *rest, **more)

    monkeypatch.setattr(endpoint._client, "register_system_shared_memory", elsewhere)
    before = regions()
    features = await endpoint.run([picture(1)], max(endpoint.versions), 10.0)
    assert features.shape[0] == 1
    assert regions() == before
    await endpoint.close()


async def test_regions_are_given_back_when_callers_give_up(encoder: ScheduledEncoder) -> None:
    tasks = [asyncio.create_task(encoder.encode(picture(number), 30.0)) for number in range(80)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    given_up = sum(task.cancel() for task in tasks[::2])  # Those that are finished already cannot be.
    assert given_up > 0
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) == given_up
    assert sum(isinstance(outcome, np.ndarray) for outcome in outcomes) == 80 - given_up


async def until_used(encoder: ScheduledEncoder, settings: TritonSettings, before: float) -> None:
    """Encodes until a Triton has finished more batches than before; one that was slow is tried again after a while."""
    async with asyncio.timeout(60):
        while batches(encoder, settings) <= before:
            await encoder.refresh(2.0)
            await encode_all(encoder, 20)
            await asyncio.sleep(0.5)


def tritonserver(server: TritonServer) -> psutil.Process:
    assert server.pid is not None
    return psutil.Process(server.pid)


async def test_one_that_hangs_is_left_out_and_comes_back(
    encoder: ScheduledEncoder, servers: list[TritonServer], settings_of_two: list[TritonSettings]
) -> None:
    await encode_all(encoder, 20)
    tritonserver(servers[1]).send_signal(signal.SIGSTOP)
    try:
        await encode_all(encoder, 60)
        await encoder.refresh(1.0)
        before = batches(encoder, settings_of_two[1])
        await encode_all(encoder, 30)
        assert batches(encoder, settings_of_two[1]) == before
    finally:
        tritonserver(servers[1]).send_signal(signal.SIGCONT)
    await until_used(encoder, settings_of_two[1], before)


async def test_one_that_is_killed_costs_no_image_and_works_again_after_its_restart(
    encoder: ScheduledEncoder, servers: list[TritonServer], settings_of_two: list[TritonSettings]
) -> None:
    await encode_all(encoder, 20)

    async def kill() -> None:
        await asyncio.sleep(0.02)
        await asyncio.to_thread(servers[1].stop, grace_s=0)

    before = batches(encoder, settings_of_two[1])
    _, features = await asyncio.gather(kill(), encode_all(encoder, 100))
    assert len(features) == 100
    servers[1] = TritonServer(settings_of_two[1], die_with_parent=True)
    await asyncio.to_thread(servers[1].start)
    await asyncio.to_thread(servers[1].wait_ready)
    await until_used(encoder, settings_of_two[1], before)
