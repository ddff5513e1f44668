import asyncio
from typing import Any

import pytest

from tests.router.conftest import Answer, Rig
from tests.router.fakes import SPEC, ask, png
from triptych.v1 import inference_pb2
from triptych.vision.reduction_spec import parse_reduction, to_message

RED = png((255, 0, 0))


async def reduced(rig: Rig, text: str, *content: bytes | str) -> Answer:
    return await rig.answer(ask(*(content or (RED, "?")), reduction=to_message(parse_reduction(text))))


@pytest.mark.parametrize("method", ["kmeans", "merge"])
async def test_fewer_tokens_reach_the_prompt_and_the_report_says_so(rig: Rig, method: str) -> None:
    answer = await reduced(rig, f"{method}:16")
    (image,) = answer.started.images
    assert (image.encoder_tokens, image.visual_tokens) == (64, 16)
    assert image.reduction == to_message(parse_reduction(f"{method}:16"))
    assert rig.worker.requests[0].prompt.images[0].token_count == 16
    (features,) = rig.worker.features[0]
    assert features is not None
    assert features.shape == (16, SPEC.hidden_size)
    durations = answer.finished.durations
    assert 0 < durations.reduce.ToNanoseconds() < durations.encode.ToNanoseconds()


async def test_each_reduction_has_features_and_an_identity_of_its_own(rig: Rig) -> None:
    texts = ["none", "kmeans:16", "merge:16", "kmeans:8"]
    answers = [await reduced(rig, text) for text in texts]
    assert len({answer.started.images[0].identity for answer in answers}) == len(texts)
    assert [len(features[0]) for features in rig.worker.features if features[0] is not None] == [64, 16, 16, 8]
    again = await reduced(rig, "kmeans:16")
    assert again.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE


async def test_features_that_another_request_left_whole_are_reduced_without_encoding_again(rig: Rig) -> None:
    await reduced(rig, "none")
    await reduced(rig, "kmeans:16")
    assert rig.encoder.calls == 1


async def test_an_image_with_no_more_tokens_is_left_as_it_is_and_shares_everything(rig: Rig) -> None:
    whole = await reduced(rig, "none")
    same = await reduced(rig, "kmeans:64")
    assert same.started.images[0].identity == whole.started.images[0].identity
    assert same.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
    assert not same.started.images[0].HasField("reduction")
    assert not same.finished.durations.HasField("reduce")


async def test_concurrent_requests_for_one_reduction_encode_and_reduce_once(rig: Rig) -> None:
    rig.encoder.behave = lambda: asyncio.sleep(0.05)
    answers = await asyncio.gather(*(reduced(rig, "merge:16") for _ in range(6)))
    assert rig.encoder.calls == 1
    assert sum(answer.finished.durations.HasField("reduce") for answer in answers) == 1


@pytest.mark.parametrize("settings", [{"token_reduction": "kmeans:32"}])
async def test_the_routers_default_counts_unless_the_request_says_otherwise(rig: Rig, settings: dict[str, Any]) -> None:
    silent, other, whole = await rig.answer(ask(RED, "?")), await reduced(rig, "merge:8"), await reduced(rig, "none")
    assert [answer.started.images[0].visual_tokens for answer in (silent, other, whole)] == [32, 8, 64]


async def test_a_reduction_out_of_range_is_refused_before_any_work(rig: Rig) -> None:
    bad = inference_pb2.TokenReduction(method=inference_pb2.REDUCTION_METHOD_KMEANS, tokens=10_000)
    error = await rig.failure(ask(RED, "?", reduction=bad))
    assert error.reason == "REDUCTION_INVALID"
    assert "1 to 9999" in error.message
    assert rig.encoder.calls == 0


async def test_a_client_that_leaves_while_its_tokens_are_reduced_leaves_nothing_behind(rig: Rig) -> None:
    started = asyncio.Event()

    async def behave() -> None:
        started.set()
        await asyncio.sleep(0.01)

    rig.encoder.behave = behave
    call = rig.stub.Generate(ask(RED, "?", reduction=to_message(parse_reduction("kmeans:32"))))
    await started.wait()
    await asyncio.sleep(0.012)
    call.cancel()
