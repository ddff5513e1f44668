"""What the router does around the encoder: bypasses, counters, and an encoder that is replaced under a request."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.router.conftest import Rig, until
from tests.router.fakes import SPEC, ask, png
from triptych.errors import Overloaded
from triptych.router.metrics import RouterMetrics
from triptych.v1 import generation_pb2, inference_pb2

RED, BLUE = png((255, 0, 0)), png((0, 0, 255))


def lookups(metrics: RouterMetrics) -> dict[tuple[str, str], int]:
    samples = [sample for metric in metrics.lookups.collect() for sample in metric.samples]
    return {
        (sample.labels["lookup"], sample.labels["outcome"]): int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
    }


async def test_text_alone_never_touches_the_vision_path(rig: Rig) -> None:
    rig.encoder.spec, rig.encoder.ready = None, False
    assert (await rig.answer(ask("how are you?"))).text == "abc"
    assert rig.encoder.calls == 0
    assert not lookups(rig.router.metrics)


async def test_each_look_up_is_counted_and_a_hit_never_reaches_the_encoder(rig: Rig) -> None:
    first = await rig.answer(ask(RED, "?"))
    await rig.answer(ask(RED, "another?"))
    rig.worker.kv.add(bytes.fromhex(first.started.images[0].identity))
    await rig.answer(ask(RED, BLUE, "?"))
    assert rig.encoder.calls == 2
    assert lookups(rig.router.metrics) == {
        ("kv", "hit"): 1,
        ("kv", "miss"): 3,
        ("embedding", "hit"): 1,
        ("embedding", "miss"): 2,
        ("encoder", "hit"): 2,
    }


async def test_an_encoder_replaced_between_name_and_features_is_asked_anew(rig: Rig) -> None:
    replaced = replace(SPEC, version="2", fingerprint="beef")

    async def replace_it() -> None:
        rig.encoder.spec = replaced

    rig.worker.probe = replace_it
    answer = await rig.answer(ask(RED, "?"))
    assert rig.encoder.calls == 2
    (image,) = answer.started.images
    assert image.source == inference_pb2.FEATURE_SOURCE_ENCODER
    again = await rig.answer(ask(RED, "?"))
    assert again.started.images[0].identity == image.identity
    assert again.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE


def pictures(count: int) -> list[bytes]:
    return [png((number, 200 - number, 40)) for number in range(count)]


async def test_many_pending_requests_lower_the_resolution_and_the_answer_says_why(rig: Rig) -> None:
    await rig.answer(ask(RED, "?"))
    held = asyncio.Event()
    rig.worker.before_first = held.wait
    crowd = [asyncio.create_task(rig.answer(ask(picture, "?"))) for picture in pictures(30)]
    await until(lambda: rig.router.pipeline.admission.pending == 30 and len(rig.worker.requests) == 31)
    late = asyncio.create_task(rig.answer(ask(png((1, 2, 3)), "?")))
    forbidding = ask(png((3, 2, 1)), "?", degradation_policy=inference_pb2.DEGRADATION_POLICY_FORBID)
    refused = await rig.failure(forbidding)
    assert isinstance(refused, Overloaded) and refused.reason == "RESOLUTION_LOWERED"
    known = asyncio.create_task(rig.answer(ask(RED, "a second turn?")))
    held.set()
    await asyncio.gather(*crowd)
    (image,) = (await late).started.images
    assert (image.detail, image.resolution_reason, image.encoded_side) == (
        inference_pb2.IMAGE_DETAIL_LOW,
        inference_pb2.RESOLUTION_REASON_PENDING,
        56,
    )
    (degradation,) = (await late).finished.degradations
    assert degradation.kind == inference_pb2.DEGRADATION_KIND_LOWER_RESOLUTION
    assert "low_pending" in degradation.explanation
    assert (await known).started.images[0].encoded_side == 112
    assert not (await known).finished.degradations
    sample = rig.router.metrics.registry.get_sample_value
    assert sample("mm_image_resolutions_total", {"detail": "low", "reason": "pending"})


async def test_economy_requests_get_one_step_less_unless_they_forbid_it(rig: Rig) -> None:
    economy = {"priority": generation_pb2.PRIORITY_ECONOMY}
    answer = await rig.answer(ask(RED, "?", **economy))
    assert answer.started.images[0].encoded_side == 70
    assert answer.finished.degradations
    forbid = inference_pb2.DEGRADATION_POLICY_FORBID
    answer = await rig.answer(ask(BLUE, "?", degradation_policy=forbid, **economy))
    assert answer.started.images[0].encoded_side == 112
    assert not answer.finished.degradations


# 112 x 112 pixels and 64 rows of 8 features, as float32: room for six pictures.
@pytest.mark.parametrize("settings", [{"max_held_bytes": 1 << 20, "resolution_by_load": False}])
async def test_bytes_between_encode_and_prefill_are_bounded_and_everybody_gets_their_turn(
    rig: Rig, settings: dict[str, Any]
) -> None:
    held = asyncio.Event()
    rig.worker.before_first = held.wait
    holding = rig.router.pipeline.holding
    crowd = [asyncio.create_task(rig.answer(ask(picture, "?"))) for picture in pictures(30)]
    await until(lambda: len(rig.worker.requests) == 6 and holding.waiting == 24)
    crowd.pop(20).cancel()  # One that waits.
    await until(lambda: holding.waiting == 23)
    assert holding.held_bytes <= 1 << 20
    held.set()
    answers = await asyncio.gather(*crowd)
    assert all(answer.text == "abc" for answer in answers)
    assert holding.held_bytes == 0


@pytest.mark.parametrize("settings", [{"max_held_bytes": 1 << 20}])
async def test_images_that_never_fit_between_encode_and_prefill_are_refused_with_the_knobs_name(
    rig: Rig, settings: dict[str, Any]
) -> None:
    error = await rig.failure(ask(*pictures(7), "?"))
    assert error.reason == "IMAGES_TOO_LARGE" and "max_held_bytes" in error.message


@pytest.mark.parametrize("settings", [{"max_held_bytes": 1 << 20, "queue_timeout_s": 0.3, "resolution_by_load": False}])
async def test_no_room_in_time_is_overload(rig: Rig, settings: dict[str, Any]) -> None:
    held = asyncio.Event()
    rig.worker.before_first = held.wait
    crowd = [asyncio.create_task(rig.answer(ask(picture, "?"))) for picture in pictures(6)]
    await until(lambda: len(rig.worker.requests) == 6)
    error = await rig.failure(ask(RED, "?"))
    assert isinstance(error, Overloaded) and "max_held_bytes" in error.message
    held.set()
    await asyncio.gather(*crowd)
