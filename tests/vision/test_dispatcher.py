"""The scheduled encoder over fake endpoints, which exist for time and failure."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opentelemetry.context import Context

from tests.router.fakes import SPEC
from triptych.errors import EncoderChanged, InvalidRequest, Overloaded, StageTimeout, TriptychError, Unavailable
from triptych.vision.dispatcher import ScheduledEncoder
from triptych.vision.encoder import Features
from triptych.vision.encoder_spec import EncoderSpec
from triptych.vision.pool import EncoderPool
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import EncodeClass, Limits

LIMITS = Limits(pixel_budget=8 * 56 * 56, max_inflight=2, batch_timeout_s=0.02, lift_s=1.0)


class FakeEndpoint:
    """Features are an image's mean; `behave` gets the batch and may sleep or raise."""

    def __init__(self, address: str = "fake") -> None:
        self.address = address
        self.versions: Mapping[str, EncoderSpec] = {"1": replace(SPEC, max_images=64)}
        self.ready = True
        self.pending = 0
        self.batches: list[list[float]] = []
        self.running = 0
        self.most_running = self.most_pixels = 0
        self.behave: Callable[[Sequence[Pixels]], Any] = lambda images: asyncio.sleep(0)

    async def refresh(self, timeout_s: float) -> bool:
        return self.ready

    async def run(
        self, images: Sequence[Pixels], version: str, timeout_s: float, traces: Sequence[Context | None] = ()
    ) -> Features:
        self.batches.append([float(image.mean()) for image in images])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.most_pixels = max(self.most_pixels, sum(image[0].size for image in images))
        try:
            async with asyncio.timeout(timeout_s):
                await self.behave(images)
        except TimeoutError:
            raise StageTimeout("late", reason="ENCODE_TIMEOUT") from None
        finally:
            self.running -= 1
        tokens = SPEC.token_count(*images[0].shape[1:])
        return np.stack([np.full((tokens, SPEC.hidden_size), image.mean(), np.float32) for image in images])

    async def close(self) -> None:
        pass


def picture(value: float, side: int = 56) -> Pixels:
    return np.full((3, side, side), value, np.float32)


def scheduled(*endpoints: FakeEndpoint, limits: Limits = LIMITS, max_waiting: int = 1000) -> ScheduledEncoder:
    return ScheduledEncoder(EncoderPool(endpoints), limits, 448 * 448, max_waiting)


@pytest.fixture
async def endpoint() -> FakeEndpoint:
    return FakeEndpoint()


@pytest.fixture
async def encoder(endpoint: FakeEndpoint) -> AsyncIterator[ScheduledEncoder]:
    encoder = scheduled(endpoint)
    yield encoder
    encoder.check_integrity()
    assert encoder.waiting == 0
    await encoder.close()


async def encode(encoder: ScheduledEncoder, value: float, side: int = 56, timeout_s: float = 5.0, **more: Any) -> float:
    features = await encoder.encode(picture(value, side), timeout_s, **more)
    assert features.shape == (SPEC.token_count(side), SPEC.hidden_size)
    return float(features.mean())


async def test_images_that_come_together_share_batches_and_each_gets_its_own_features(
    encoder: ScheduledEncoder, endpoint: FakeEndpoint
) -> None:
    endpoint.behave = lambda images: asyncio.sleep(0.01)
    values = await asyncio.gather(*(encode(encoder, value, 28 if value % 3 else 56) for value in range(30)))
    assert values == list(range(30))
    assert len(endpoint.batches) < 20
    assert endpoint.most_running <= LIMITS.max_inflight
    assert endpoint.most_pixels <= LIMITS.full_pixels


async def test_features_do_not_keep_their_batch_in_memory(encoder: ScheduledEncoder) -> None:
    first, second = await asyncio.gather(encoder.encode(picture(1), 5.0), encoder.encode(picture(2), 5.0))
    assert first.base is None and second.base is None


async def test_an_image_alone_does_not_wait_for_company_that_is_not_coming(encoder: ScheduledEncoder) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await encode(encoder, 1)
    assert loop.time() - started < LIMITS.batch_timeout_s


async def test_an_image_waits_a_moment_for_one_that_is_expected(
    encoder: ScheduledEncoder, endpoint: FakeEndpoint
) -> None:
    with encoder.expect():
        first = asyncio.create_task(encode(encoder, 1))
        await asyncio.sleep(0.005)
        second = asyncio.create_task(encode(encoder, 2))
        await asyncio.sleep(0.002)
    await asyncio.gather(first, second)
    assert endpoint.batches == [[1, 2]]


async def test_interactive_images_overtake_others(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    endpoint.behave = lambda images: asyncio.sleep(0.02)
    classes = [EncodeClass.ECONOMY] * 12 + [EncodeClass.INTERACTIVE] * 4
    await asyncio.gather(*(encode(encoder, value, priority=one) for value, one in enumerate(classes)))
    assert endpoint.batches[0] == [12, 13, 14, 15]


async def test_cancelled_images_leave_no_hole_and_nothing_behind(
    encoder: ScheduledEncoder, endpoint: FakeEndpoint
) -> None:
    given_up = asyncio.Event()
    endpoint.behave = lambda images: given_up.wait()
    tasks = [asyncio.create_task(encode(encoder, value)) for value in range(24)]
    await asyncio.sleep(0.005)
    for task in tasks[::2]:
        task.cancel()
    given_up.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, BaseException)] == list(range(1, 24, 2))


async def test_a_batch_stops_when_its_last_caller_has_gone(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    endpoint.behave = lambda images: asyncio.sleep(60)
    tasks = [asyncio.create_task(encode(encoder, value)) for value in range(2)]
    await asyncio.sleep(0.03)
    assert endpoint.running == 1
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert endpoint.running == 1
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert endpoint.running == 0


async def test_a_late_encoder_is_a_timeout(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    endpoint.behave = lambda images: asyncio.sleep(60)
    with pytest.raises(StageTimeout) as caught:
        await encode(encoder, 1, timeout_s=0.05)
    assert caught.value.reason == "ENCODE_TIMEOUT"


async def test_an_image_beyond_the_limit_is_refused_with_the_knobs_name(encoder: ScheduledEncoder) -> None:
    with pytest.raises(InvalidRequest, match="encode_max_pixels") as caught:
        await encode(encoder, 1, side=462)
    assert caught.value.reason == "ENCODE_TOO_LARGE"


async def test_an_image_over_the_budget_is_encoded_alone(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    endpoint.behave = lambda images: asyncio.sleep(0.01)
    await asyncio.gather(*(encode(encoder, value, 448 if value == 3 else 28) for value in range(6)))
    assert [3] in endpoint.batches


async def test_a_full_queue_refuses_at_once_with_the_knobs_name(endpoint: FakeEndpoint) -> None:
    encoder = scheduled(endpoint, max_waiting=4)
    endpoint.behave = lambda images: asyncio.sleep(0.05)
    outcomes = await asyncio.gather(*(encode(encoder, value) for value in range(20)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert all("encode_max_waiting" in error.message for error in refused)
    assert Counter(type(outcome) for outcome in outcomes) == {float: 4, Overloaded: 16}
    encoder.check_integrity()


async def test_a_queue_that_would_take_too_long_refuses_at_once(endpoint: FakeEndpoint) -> None:
    encoder = scheduled(endpoint)
    endpoint.behave = lambda images: asyncio.sleep(0.2)
    await encode(encoder, 0)
    outcomes = await asyncio.gather(
        *(encode(encoder, value, timeout_s=0.9) for value in range(100)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert refused and all("encode_timeout_s" in error.message for error in refused)
    assert all(isinstance(outcome, float | Overloaded) for outcome in outcomes)
    encoder.check_integrity()


async def test_an_image_that_breaks_its_batch_fails_alone(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    async def behave(images: Sequence[Pixels]) -> None:
        if any(image.mean() == 2 for image in images):
            raise TriptychError("no", reason="ENCODER_FAILED")

    endpoint.behave = behave
    outcomes = await asyncio.gather(*(encode(encoder, value) for value in range(4)), return_exceptions=True)
    assert [isinstance(outcome, TriptychError) for outcome in outcomes] == [False, False, True, False]


async def test_features_that_are_not_finite_fail_their_image_only(encoder: ScheduledEncoder) -> None:
    outcomes = await asyncio.gather(*(encode(encoder, value) for value in (1, np.nan, 3)), return_exceptions=True)
    assert [getattr(outcome, "reason", "") for outcome in outcomes] == ["", "ENCODER_FAILED", ""]


async def test_a_lost_encoder_is_unavailable_at_once_when_there_is_no_other(
    encoder: ScheduledEncoder, endpoint: FakeEndpoint
) -> None:
    async def behave(images: Sequence[Pixels]) -> None:
        raise Unavailable("gone", reason="ENCODER_UNAVAILABLE")

    endpoint.behave = behave
    with pytest.raises(Unavailable):
        await encode(encoder, 1)
    endpoint.ready = False
    with pytest.raises(Unavailable):
        await encode(encoder, 1)


async def test_a_version_that_is_gone_says_so(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    with pytest.raises(EncoderChanged):
        await encode(encoder, 1, version="7")


async def test_versions_never_share_a_batch(encoder: ScheduledEncoder, endpoint: FakeEndpoint) -> None:
    endpoint.versions = {"1": replace(SPEC, max_images=64), "2": replace(SPEC, version="2", max_images=64)}
    await asyncio.gather(*(encode(encoder, value, version="12"[value % 2]) for value in range(8)))
    assert all(len({value % 2 for value in batch}) == 1 for batch in endpoint.batches)


async def test_a_lost_endpoint_is_left_out_loses_no_image_and_comes_back() -> None:
    good, bad = FakeEndpoint("good"), FakeEndpoint("bad")
    encoder = scheduled(good, bad)
    good.behave = lambda images: asyncio.sleep(0.01)

    async def fail(images: Sequence[Pixels]) -> None:
        raise Unavailable("gone", reason="ENCODER_UNAVAILABLE")

    bad.behave = fail
    values = await asyncio.gather(*(encode(encoder, value) for value in range(40)))
    assert values == list(range(40))
    assert 1 <= len(bad.batches) <= 2
    bad.behave = good.behave
    await asyncio.sleep(1.1)
    await asyncio.gather(*(encode(encoder, value) for value in range(40)))
    assert len(bad.batches) > 2
    encoder.check_integrity()


async def test_a_hanging_endpoint_is_left_out_and_its_images_are_encoded_elsewhere() -> None:
    good, hanging = FakeEndpoint("good"), FakeEndpoint("hanging")
    encoder = scheduled(good, hanging)
    good.behave = lambda images: asyncio.sleep(0.01)
    hanging.behave = lambda images: asyncio.sleep(60)
    loop = asyncio.get_running_loop()
    started = loop.time()
    values = await asyncio.gather(*(encode(encoder, value) for value in range(40)))
    assert values == list(range(40))
    assert loop.time() - started < 3
    assert len(hanging.batches) <= 2
    encoder.check_integrity()


async def test_the_endpoint_that_would_be_done_first_gets_the_batch() -> None:
    fast, slow = FakeEndpoint("fast"), FakeEndpoint("slow")
    encoder = scheduled(fast, slow)
    fast.behave = lambda images: asyncio.sleep(0.005)
    slow.behave = lambda images: asyncio.sleep(0.1)
    await asyncio.gather(*(encode(encoder, value) for value in range(200)))
    assert sum(map(len, fast.batches)) > 5 * sum(map(len, slow.batches))
    fast.pending = 10_000  # Somebody else's work.
    before = len(slow.batches)
    await encode(encoder, 1)
    assert len(slow.batches) == before + 1


async def test_an_image_that_one_encoder_was_slow_with_and_another_is_gone_goes_back_to_the_slow_one() -> None:
    gone, slow = FakeEndpoint("gone"), FakeEndpoint("slow")
    gone.pending = 9  # At first the other one looks quicker.

    async def first_is_late(images: Sequence[Pixels]) -> None:
        gone.pending = 0
        await asyncio.sleep(30 if len(slow.batches) == 1 else 0)

    async def refuse(images: Sequence[Pixels]) -> None:
        raise Unavailable("connection refused", reason="ENCODER_UNAVAILABLE")

    slow.behave, gone.behave = first_is_late, refuse
    encoder = scheduled(gone, slow)
    assert await encode(encoder, 3.0) == 3.0
    assert (len(slow.batches), len(gone.batches)) == (2, 1)
    encoder.check_integrity()
    await encoder.close()
