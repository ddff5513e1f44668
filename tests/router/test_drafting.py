"""Draft encoding in the router, with fake encoders and a fake worker that holds its words back until the verdict."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.router.conftest import Answer, Rig, until
from tests.router.fakes import SPEC, ask, png
from triptych import tensors
from triptych.errors import EncoderChanged, FeaturesRequired, StageTimeout, Unavailable
from triptych.v1 import inference_pb2
from triptych.vision.reduction_spec import parse_reduction, to_message

RED, BLUE = png((255, 0, 0)), png((0, 0, 255))
ACROSS = np.array([1, -1] * (SPEC.hidden_size // 2), np.float32)
"""At a right angle to what the encoder gives."""


def drafted(*content: bytes | str, **options: Any) -> inference_pb2.GenerateRequest:
    fields = {name: options.pop(name) for name in ("degradation_policy", "reduction", "cache_salt") if name in options}
    draft = inference_pb2.DraftOptions(**{"mode": inference_pb2.DRAFT_MODE_ON, **options})
    return ask(*(content or (RED, "?")), draft=draft, **fields)


def slow(seconds: float) -> Callable[[], Any]:
    return lambda: asyncio.sleep(seconds)


def after_drafts(rig: Rig, count: int = 1) -> Callable[[], Any]:
    """Returns an encode that is done once the worker has got so many more requests with a draft."""
    before = len(rig.worker.requests)
    return lambda: until(lambda: len(rig.worker.requests) >= before + count)


def failing(error: Exception, after_s: float = 0.0) -> Callable[[], Any]:
    async def behave() -> None:
        await asyncio.sleep(after_s)
        raise error

    return behave


async def test_the_worker_gets_the_draft_at_once_and_its_words_come_after_the_verdict(rig: Rig) -> None:
    release = asyncio.Event()
    rig.encoder.behave = release.wait
    answering = asyncio.create_task(rig.answer(drafted()))
    await until(lambda: bool(rig.worker.features))
    await asyncio.sleep(0.05)
    assert not answering.done() and not rig.worker.verdicts
    release.set()
    answer = await answering
    assert answer.text == "abc"
    (verdict,) = rig.worker.verdicts
    assert verdict.keep and verdict.id == rig.worker.requests[0].draft.id
    assert answer.started.images[0].source == inference_pb2.FEATURE_SOURCE_DRAFT
    report = answer.finished.draft
    assert (report.outcome, report.drafted_tokens) == (inference_pb2.DRAFT_OUTCOME_KEPT, 2)
    assert report.similarity == pytest.approx(1)
    counted = rig.router.metrics.registry.get_sample_value
    assert counted("mm_vision_drafts_total", {"outcome": "kept"}) == 1
    assert counted("mm_image_lookups_total", {"lookup": "encoder", "outcome": "hit"}) == 1
    durations = answer.finished.durations
    assert 0 < durations.draft.ToNanoseconds() < durations.encode.ToNanoseconds()


async def test_a_draft_that_is_unlike_is_replaced_by_the_encoders_features(rig: Rig) -> None:
    rig.encoder.behave = after_drafts(rig)
    rig.draft_encoder.direction = ACROSS
    answer = await rig.answer(drafted())
    (verdict,) = rig.worker.verdicts
    assert not verdict.keep
    (image,) = verdict.images
    assert image.identity.hex() == answer.started.images[0].identity
    features = tensors.from_proto(image.features)
    assert features.shape == (image.token_count, SPEC.hidden_size)
    assert (features == features[0, 0]).all()
    report = answer.finished.draft
    assert report.outcome == inference_pb2.DRAFT_OUTCOME_REJECTED
    assert (report.similarity, report.lowest_similarity) == pytest.approx((0, 0), abs=1e-6)


async def test_the_drafts_identity_is_its_own_and_the_target_is_cached_under_its(rig: Rig) -> None:
    rig.encoder.behave = after_drafts(rig)
    answer = await rig.answer(drafted())
    sent = rig.worker.requests[0].prompt.images[0]
    assert sent.identity.hex() != answer.started.images[0].identity
    again = await rig.answer(drafted())
    assert again.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
    assert not again.finished.HasField("draft")
    assert rig.worker.requests[1].prompt.images[0].identity.hex() == answer.started.images[0].identity
    assert (rig.encoder.calls, rig.draft_encoder.calls) == (1, 1)


@pytest.mark.parametrize("threshold", [0.6, 0.8])
async def test_the_mean_of_the_tokens_decides_by_the_requests_threshold(rig: Rig, threshold: float) -> None:
    rig.encoder.behave = after_drafts(rig)
    rig.draft_encoder.direction = 1 + ACROSS  # 45 degrees: 0.71.
    answer = await rig.answer(drafted(threshold=threshold))
    kept = answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_KEPT
    assert kept == (threshold < 0.7)
    assert answer.finished.draft.similarity == pytest.approx(0.7071, abs=1e-3)


async def test_of_several_images_the_least_similar_counts_and_cached_ones_stay(rig: Rig) -> None:
    await rig.answer(ask(BLUE, "?"))
    rig.encoder.behave = after_drafts(rig)
    rig.draft_encoder.direction = ACROSS
    answer = await rig.answer(drafted(BLUE, RED, "?"))
    sources = [image.source for image in answer.started.images]
    assert sources == [inference_pb2.FEATURE_SOURCE_ENCODER_CACHE, inference_pb2.FEATURE_SOURCE_DRAFT]
    blue, red = rig.worker.verdicts[0].images
    assert not blue.identity and red.identity
    assert rig.draft_encoder.calls == 1


async def test_an_encoder_that_is_first_makes_the_draft_unneeded(rig: Rig) -> None:
    rig.draft_encoder.behave = slow(5)
    answer = await rig.answer(drafted())
    assert answer.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER
    assert answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_UNNEEDED
    assert not rig.worker.requests[0].HasField("draft")


async def test_a_draft_encoder_that_is_away_costs_nothing_but_the_draft(rig: Rig) -> None:
    rig.encoder.behave = slow(0.1)
    rig.draft_encoder.ready = False
    away = await rig.answer(drafted())
    rig.draft_encoder.ready = True
    rig.draft_encoder.behave = failing(Unavailable("gone"))
    failed = await rig.answer(drafted(BLUE, "?"))
    for answer in (away, failed):
        assert answer.text == "abc"
        assert answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_UNAVAILABLE


async def test_a_draft_encoder_that_does_not_fit_is_not_used(rig: Rig) -> None:
    rig.encoder.behave = slow(0.1)
    rig.draft_encoder.spec = replace(SPEC, hidden_size=16)
    answer = await rig.answer(drafted())
    assert answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_UNAVAILABLE
    assert rig.draft_encoder.calls == 0


async def test_without_being_asked_for_there_is_no_draft(rig: Rig) -> None:
    for request in (ask(RED, "?"), drafted(mode=inference_pb2.DRAFT_MODE_OFF, cache_salt="b")):
        assert not (await rig.answer(request)).finished.HasField("draft")
    assert rig.draft_encoder.calls == 0


@pytest.mark.parametrize("settings", [{"speculative_vision": True, "draft_threshold": 0.5}])
async def test_the_routers_default_counts_where_the_request_says_nothing(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = after_drafts(rig)
    rig.draft_encoder.direction = 1 + ACROSS
    answer = await rig.answer(ask(RED, "?"))
    assert answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_KEPT
    rig.encoder.behave = slow(0)
    off = await rig.answer(drafted(BLUE, "?", mode=inference_pb2.DRAFT_MODE_OFF))
    reduced = await rig.answer(ask(RED, "!", reduction=to_message(parse_reduction("merge:8"))))
    assert not off.finished.HasField("draft") and not reduced.finished.HasField("draft")


async def test_early_text_is_passed_on_and_retracted(rig: Rig) -> None:
    release = asyncio.Event()
    rig.encoder.behave = release.wait
    rig.draft_encoder.direction = ACROSS
    answer = Answer()
    async for event in rig.stub.Generate(drafted(early_text=True)):
        answer.order.append(str(event.WhichOneof("event")))
        if answer.order[-3:] == ["chunk"] * 3:
            release.set()
    assert answer.order == ["started", "chunk", "chunk", "chunk", "retracted", "chunk", "finished"]


# Lateness and failure


@pytest.mark.parametrize("settings", [{"encode_timeout_s": 0.2}])
async def test_a_late_encoder_leaves_the_draft_unchecked_and_says_so(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = slow(5)
    answer = await rig.answer(drafted())
    assert answer.text == "abc"
    assert rig.worker.verdicts[0].keep
    assert answer.finished.draft.outcome == inference_pb2.DRAFT_OUTCOME_UNVERIFIED
    assert not answer.finished.draft.HasField("similarity")
    kinds = [degradation.kind for degradation in answer.finished.degradations]
    assert kinds == [inference_pb2.DEGRADATION_KIND_UNVERIFIED_DRAFT]


@pytest.mark.parametrize("settings", [{"encode_timeout_s": 0.2}])
async def test_a_late_encoder_is_an_error_where_degradation_is_forbidden(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = slow(5)
    error = await rig.failure(drafted(degradation_policy=inference_pb2.DEGRADATION_POLICY_FORBID))
    assert isinstance(error, StageTimeout) and error.reason == "ENCODE_TIMEOUT"
    await until(lambda: rig.worker.running == 0)


async def test_an_encoder_that_fails_beside_a_draft_fails_the_request_at_once(rig: Rig) -> None:
    rig.encoder.behave = failing(Unavailable("the vision encoder does not answer", reason="ENCODER_UNAVAILABLE"), 0.1)
    error = await rig.failure(drafted())
    assert error.reason == "ENCODER_UNAVAILABLE"
    await until(lambda: rig.worker.running == 0)


async def test_a_verdict_that_does_not_arrive_fails_the_request(rig: Rig) -> None:
    rig.encoder.behave = after_drafts(rig)
    rig.worker.before_settled = failing(RuntimeError("broken"))
    await rig.failure(drafted())
    await until(lambda: rig.worker.running == 0)


async def test_kv_that_is_missing_for_a_draft_falls_back_to_the_encoders_features(rig: Rig) -> None:
    rig.worker.refuse = FeaturesRequired("evicted")

    async def behave() -> None:
        await until(lambda: len(rig.worker.requests) > 0)
        rig.worker.refuse = None

    rig.encoder.behave = behave
    answer = await rig.answer(drafted())
    assert answer.text == "abc"
    first, second = rig.worker.requests
    assert first.HasField("draft") and not second.HasField("draft")
    assert second.prompt.images[0].identity.hex() == answer.started.images[0].identity
    assert answer.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER


async def test_an_encoder_that_is_replaced_beside_a_draft_names_the_images_anew(rig: Rig) -> None:
    changes = [EncoderChanged("replaced")]

    async def behave() -> None:
        await until(lambda: len(rig.worker.requests) == 2 - len(changes))
        if changes:
            raise changes.pop()

    rig.encoder.behave = behave
    answer = await rig.answer(drafted())
    assert answer.text == "abc"
    assert len(rig.worker.requests) == 2


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.15, 0.25], ids=["preparing", "drafting", "waiting", "settled"])
async def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(rig: Rig, wait_s: float) -> None:
    rig.draft_encoder.behave = slow(0.1)
    rig.encoder.behave = slow(0.2)
    call = rig.stub.Generate(drafted())
    await asyncio.sleep(wait_s)
    call.cancel()
    await until(lambda: rig.worker.running == 0)


async def test_many_drafts_of_one_image_encode_it_once(rig: Rig) -> None:
    rig.encoder.behave = after_drafts(rig, 6)
    rig.draft_encoder.behave = slow(0.02)
    answers = await asyncio.gather(*(rig.answer(drafted()) for _ in range(6)))
    assert [answer.text for answer in answers] == ["abc"] * 6
    assert (rig.encoder.calls, rig.draft_encoder.calls) == (1, 1)
    assert len(rig.worker.verdicts) == 6


# Refusal


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 1.5}, {"threshold": float("nan")}, {"mode": 9}])
async def test_options_out_of_range_are_refused(rig: Rig, options: dict[str, Any]) -> None:
    assert (await rig.failure(drafted(**options))).reason == "DRAFT_INVALID"


async def test_a_draft_and_a_reduction_together_are_refused(rig: Rig) -> None:
    error = await rig.failure(drafted(reduction=to_message(parse_reduction("kmeans:8"))))
    assert error.reason == "DRAFT_INVALID"
    assert "reduction none" in error.message
