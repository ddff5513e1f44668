"""Features that routers share through a real Redis server."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from tests.worker.kv.redis_server import RedisServer, redis_server
from triptych.vision.cache import EncoderCache, Features
from triptych.vision.shared_features import SharedFeatures

IDENTITY = bytes(range(32))
FEATURES = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
TIMEOUT_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


class Replica:
    """A router's encoder cache, and how often it encoded."""

    def __init__(self, server: RedisServer) -> None:
        self.cache = EncoderCache(0, SharedFeatures(server.url, TIMEOUT_S, 60))
        self.encodes = 0

    async def ask(self) -> bool:
        """Returns whether the picture was encoded for this."""

        async def encode() -> Features:
            self.encodes += 1
            return FEATURES.copy()

        lease = await self.cache.get(IDENTITY, encode)
        assert np.array_equal(lease.features, FEATURES)
        assert not lease.features.flags.writeable
        lease.release()
        self.cache.check_idle()
        return lease.encoded


@pytest.fixture
async def replicas(server: RedisServer) -> AsyncIterator[tuple[Replica, Replica]]:
    pair = Replica(server), Replica(server)
    yield pair
    for replica in pair:
        await asyncio.to_thread(replica.cache.close)


async def stored(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        for _ in range(200):
            if await asyncio.to_thread(client.dbsize):
                return
            await asyncio.sleep(0.02)
    raise AssertionError("nothing was stored")


async def test_what_one_router_encoded_no_other_encodes(server: RedisServer, replicas: tuple[Replica, Replica]) -> None:
    first, second = replicas
    assert await first.ask()
    await stored(server)
    assert not await second.ask()
    assert second.encodes == 0


async def test_damaged_features_are_encoded_again(server: RedisServer, replicas: tuple[Replica, Replica]) -> None:
    first, second = replicas
    await first.ask()
    await stored(server)
    with redis.Redis(port=server.port) as client:
        key = b"triptych:features:" + IDENTITY.hex().encode()
        value: bytes = client.get(key)
        for damaged in (b"", b"x" * 40, value[:-1], value[:50] + b"\xff" + value[51:]):
            client.set(key, damaged)
            assert await second.ask()
            while client.get(key) != value:  # It tells the others again.
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["hang", "kill"])
async def test_without_its_server_a_router_encodes_itself_and_waits_for_nothing(
    server: RedisServer, replicas: tuple[Replica, Replica], how: str
) -> None:
    first, _ = replicas
    getattr(server, how)()
    seconds = []
    for _ in range(6):
        started_s = time.monotonic()
        assert await first.ask()
        seconds.append(time.monotonic() - started_s)
    assert max(seconds) < 2 * TIMEOUT_S + 0.5
    assert min(seconds) < TIMEOUT_S / 2  # By then it is not asked any more.
    if how == "hang":
        server.go_on()
