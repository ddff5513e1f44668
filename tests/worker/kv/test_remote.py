"""The remote tier over a real Redis server: shared, verified, and never waited for."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.worker.checkpoints import Reference
from tests.worker.driving import drain
from tests.worker.kv.blocks import LAYOUT, chain_of, filled, found
from tests.worker.kv.redis_server import RedisServer, redis_server
from tests.worker.kv.test_engine_tiers import bare, one, question, settle, shown, start, stop, tiers
from triptych.breaker import Breaker
from triptych.errors import FeaturesRequired
from triptych.worker.kv.tiers.remote import RemoteTier
from triptych.worker.loading import LoadedModel

Start = Callable[..., LoadedModel]
__all__ = ["start"]  # A fixture.

TIMEOUT_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def remote(server: RedisServer, **changes: Any) -> RemoteTier:
    return RemoteTier(server.url, replace(LAYOUT, **changes), timeout_s=TIMEOUT_S, ttl_s=60)


def test_what_one_worker_stores_another_finds_and_another_model_does_not(server: RedisServer) -> None:
    first, second, other = remote(server), remote(server), remote(server, fingerprint="another model")
    chain = chain_of(1, 20, visual=10)
    assert first.put(filled(chain)) == 20
    assert second.covers(chain) == 20
    assert found(second, chain) == 20
    assert other.covers(chain) == 0
    assert found(other, chain) == 0
    with redis.Redis(port=server.port) as client:
        assert all(0 < client.ttl(key) <= 60 for key in client.keys("*"))


def test_damaged_and_foreign_values_are_misses(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    tier = remote(server)
    chain = chain_of(1, 8)
    tier.put(filled(chain))
    with redis.Redis(port=server.port) as client, caplog.at_level(logging.WARNING):
        for number, identity in enumerate(chain):
            key = tier._key(identity)
            value: bytes = client.get(key)
            damaged = [
                b"",
                b"x" * len(value),
                value[:-1],
                value[:100] + bytes([value[100] ^ 1]) + value[101:],
                value[:-7] + bytes([value[-7] ^ 1]) + value[-6:],
                value + b"x",
                client.get(tier._key(chain[0])) or b"",
                b"TRIPTKV\x01" + b"\xff" * 8,
            ][number]
            client.set(key, damaged)
            assert found(tier, [identity]) == 0
    assert len(caplog.records) == 1
    assert tier.put(filled(chain)) == 8
    assert found(tier, chain) == 8


def test_dropped_blocks_are_gone_for_all(server: RedisServer) -> None:
    first, second = remote(server), remote(server)
    keep, gone = chain_of(1, 4), chain_of(2, 4)
    first.put(filled([*keep, *gone]))
    assert second.drop(lambda identity: identity in gone) == 4
    assert (found(first, keep), found(first, gone)) == (4, 0)


@pytest.mark.parametrize("how", ["hang", "kill"])
def test_a_server_that_stops_in_mid_request_is_a_miss_within_its_timeout_and_then_left_alone(
    server: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = remote(server)
    chain = chain_of(1, 64)
    tier.put(filled(chain))
    timer = threading.Timer(0.02, getattr(server, how))
    slowest_s = 0.0
    with caplog.at_level(logging.WARNING):
        timer.start()
        ends_s = time.monotonic() + 1.0
        while time.monotonic() < ends_s:
            started_s = time.monotonic()
            found(tier, chain)
            tier.put(filled(chain[:2]))
            slowest_s = max(slowest_s, time.monotonic() - started_s)
    timer.join()
    assert slowest_s < 2 * TIMEOUT_S + 1.5  # The machine may be busy; a hang would last for ever.
    assert not tier.contains(chain[0])
    assert len(caplog.records) == 1
    if how == "hang":
        server.go_on()
    else:
        server.start()
    deadline_s = time.monotonic() + 10
    while tier.put(filled(chain)) < 64:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert found(tier, chain) == 64


def test_a_breaker_opens_after_two_failures_and_lets_one_try_after_each_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("triptych.breaker.time.monotonic", lambda: now_s)
    breaker = Breaker()
    breaker.failed()
    assert breaker.may_try()
    breaker.failed()
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        seen = []
        for wait_s in (pause_s - 0.1, 0.2, 0.0):
            now_s += wait_s
            seen.append((breaker.is_closed, breaker.may_try()))
        assert seen == [(False, False), (True, True), (False, False)]
        breaker.failed()
    assert breaker.succeeded()
    assert breaker.may_try()
    assert not breaker.succeeded()


def test_two_workers_share_kv_so_the_second_needs_no_features(
    start: Start, tiny_reference: Reference, server: RedisServer
) -> None:
    picture = shown(tiny_reference, 1, 25)
    first = start(kv_remote_url=server.url)
    expected = one(first, question(first, picture)).tokens
    settle(first)
    second = start(kv_remote_url=server.url)
    asked = question(second, bare(picture), text="what is it")
    look = second.engine.reuse.look(asked.prompt, "")
    shared = tiers(second).shared
    assert look.cached_tokens == 0
    assert shared is not None
    assert look.further(shared.covers).coverage.images == (True,)
    cold = start(prefix_cache=False, kv_blocks=64)
    expected_other = one(cold, question(cold, picture, text="what is it")).tokens
    answer = one(second, asked)
    assert answer.tokens == expected_other
    assert answer.cached_tokens >= 25
    assert one(second, question(second, picture)).tokens == expected


@pytest.mark.parametrize("how", ["hang", "kill"])
def test_an_engine_whose_server_stops_answers_as_if_there_were_none(
    start: Start, tiny_reference: Reference, server: RedisServer, how: str
) -> None:
    picture = shown(tiny_reference, 1, 25)
    first = start(kv_remote_url=server.url)
    expected = one(first, question(first, picture)).tokens
    settle(first)
    second = start(kv_remote_url=server.url, kv_prefetch_timeout_s=0.3)
    getattr(server, how)()
    started_s = time.monotonic()
    assert one(second, question(second, picture)).tokens == expected
    assert time.monotonic() - started_s < 5
    try:  # Once the server counts as gone, at once; before that, when nothing has come.
        sequence, _ = second.engine.submit(question(second, bare(shown(tiny_reference, 2, 25))))
    except FeaturesRequired:
        pass
    else:
        answer = drain(second.engine, [sequence])[0]
        assert isinstance(answer.error, FeaturesRequired)
        assert not answer.tokens
    server.go_on() if how == "hang" else server.start()
    stop(second)
