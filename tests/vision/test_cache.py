import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import IntegrityError, StageTimeout, Unavailable
from triptych.vision.cache import EncoderCache, Features, Lease

ITEM_BYTES = 64


def item(value: float = 0.0, size_bytes: int = ITEM_BYTES) -> Features:
    return np.full(size_bytes // 4, value, np.float32)


class Recorder:
    """Makes encode functions that count, wait for a gate, and return or raise."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.gate = asyncio.Event()

    def waits(self, outcome: Features | Exception) -> Callable[[], Awaitable[Features]]:
        async def encode() -> Features:
            self.calls += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return encode

    def returns(self, outcome: Features) -> Callable[[], Awaitable[Features]]:
        self.gate.set()
        return self.waits(outcome)


async def test_what_was_encoded_is_kept_and_handed_out_again() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    first = await cache.get(b"a", recorder.returns(item(1)))
    second = await cache.get(b"a", recorder.returns(item(2)))
    assert (first.encoded, second.encoded) == (True, False)
    assert second.features is first.features
    assert recorder.calls == 1
    with pytest.raises(ValueError, match="read-only"):
        first.features[0] = 9
    first.release()
    first.release()
    with pytest.raises(IntegrityError):
        cache.check_idle()
    second.release()
    cache.check_idle()


async def test_concurrent_callers_share_one_encode() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    callers = [asyncio.create_task(cache.get(b"a", recorder.waits(item()))) for _ in range(5)]
    await asyncio.sleep(0.01)
    cache.check_integrity()
    recorder.gate.set()
    leases = await asyncio.gather(*callers)
    assert recorder.calls == 1
    assert [lease.encoded for lease in leases].count(True) == 1
    for lease in leases:
        lease.release()
    cache.check_idle()


async def test_when_the_first_caller_is_cancelled_the_others_still_get_the_result() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    first, second = (asyncio.create_task(cache.get(b"a", recorder.waits(item()))) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    recorder.gate.set()
    (await second).release()
    assert (recorder.calls, recorder.cancelled) == (1, 0)
    cache.check_idle()


async def test_when_all_callers_are_cancelled_so_is_the_encode_and_a_later_one_starts_anew() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    callers = [asyncio.create_task(cache.get(b"a", recorder.waits(item()))) for _ in range(3)]
    await asyncio.sleep(0.01)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    later = asyncio.create_task(cache.get(b"a", recorder.waits(item())))
    await asyncio.sleep(0.01)
    assert (recorder.calls, recorder.cancelled) == (2, 1)
    recorder.gate.set()
    (await later).release()
    cache.check_idle()


async def test_a_failure_reaches_all_who_wait_and_is_not_remembered() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    callers = [asyncio.create_task(cache.get(b"a", recorder.waits(Unavailable("gone")))) for _ in range(3)]
    await asyncio.sleep(0.01)
    recorder.gate.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    cache.check_idle()
    (await cache.get(b"a", recorder.returns(item()))).release()
    assert recorder.calls == 2


async def test_a_timeout_counts_for_the_first_caller_only_and_late_ones_try_again() -> None:
    cache, recorder = EncoderCache(1024), Recorder()
    first = asyncio.create_task(cache.get(b"a", recorder.waits(StageTimeout("late"))))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(cache.get(b"a", recorder.waits(item(5)))) for _ in range(2)]
    await asyncio.sleep(0.01)
    recorder.gate.set()
    with pytest.raises(StageTimeout):
        await first
    leases = await asyncio.gather(*others)
    assert recorder.calls == 2
    for lease in leases:
        assert lease.features[0] == 5
        lease.release()
    cache.check_idle()


async def test_the_longest_idle_entry_makes_room() -> None:
    cache, recorder = EncoderCache(2 * ITEM_BYTES), Recorder()
    for name in (b"a", b"b"):
        (await cache.get(name, recorder.returns(item()))).release()
    (await cache.get(b"a", recorder.returns(item()))).release()
    (await cache.get(b"c", recorder.returns(item()))).release()
    assert recorder.calls == 3
    (await cache.get(b"a", recorder.returns(item()))).release()
    assert recorder.calls == 3
    (await cache.get(b"b", recorder.returns(item()))).release()
    assert recorder.calls == 4
    assert cache.used_bytes == 2 * ITEM_BYTES


async def test_a_cache_full_of_entries_in_use_still_serves_others() -> None:
    cache, recorder = EncoderCache(2 * ITEM_BYTES), Recorder()
    held = [await cache.get(name, recorder.returns(item())) for name in (b"a", b"b")]
    waiting = [await cache.get(name, recorder.returns(item(7))) for name in (b"c", b"d", b"c")]
    assert all(lease.features[0] == 7 for lease in waiting)
    assert recorder.calls == 5
    for lease in held + waiting:
        lease.release()
    cache.check_idle()


@pytest.mark.parametrize("budget_bytes", [0, ITEM_BYTES - 1])
async def test_what_is_larger_than_the_budget_is_handed_out_but_not_kept(budget_bytes: int) -> None:
    cache, recorder = EncoderCache(budget_bytes), Recorder()
    for _ in range(2):
        (await cache.get(b"a", recorder.returns(item()))).release()
    assert recorder.calls == 2
    assert cache.used_bytes == 0
    cache.check_idle()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["get", "cancel", "release", "finish", "fail"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS, st.integers(0, 5))
def test_the_books_add_up_after_any_sequence_of_operations(operations: list[tuple[str, int]], room: int) -> None:
    asyncio.run(_play(operations, EncoderCache(room * ITEM_BYTES)))


async def _play(operations: list[tuple[str, int]], cache: EncoderCache) -> None:
    encodes: list[asyncio.Future[Features]] = []
    callers: list[asyncio.Task[Lease]] = []
    leases: list[Lease] = []

    async def encode() -> Features:
        outcome: asyncio.Future[Features] = asyncio.get_running_loop().create_future()
        encodes.append(outcome)
        return await outcome

    for name, number in operations:
        if name == "get":
            callers.append(asyncio.create_task(cache.get(bytes([number % 4]), encode)))
        elif name == "cancel" and callers:
            callers.pop(number % len(callers)).cancel()
        elif name == "release" and leases:
            leases.pop(number % len(leases)).release()
        elif encodes and name in ("finish", "fail"):
            outcome = encodes.pop(number % len(encodes))
            if not outcome.done():
                if name == "finish":
                    outcome.set_result(item(size_bytes=ITEM_BYTES * (1 + number % 3)))
                else:
                    outcome.set_exception(StageTimeout("late") if number % 2 else Unavailable("gone"))
        for _ in range(4):
            await asyncio.sleep(0)
        for caller in [caller for caller in callers if caller.done()]:
            callers.remove(caller)
            if caller.exception() is None:
                leases.append(caller.result())
        cache.check_integrity()
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    for lease in leases:
        lease.release()
    cache.check_idle()
