import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.router.conftest import Rig, until
from tests.router.fakes import SPEC, ask, png
from triptych.errors import InvalidRequest, Overloaded
from triptych.v1 import generation_pb2, inference_pb2

RED, BLUE = png((255, 0, 0)), png((0, 0, 255))


async def test_an_answer_is_started_then_chunks_then_finished(rig: Rig) -> None:
    answer = await rig.answer(ask(RED, "What is it?", request_id="r-1"))
    assert answer.order == ["started", "chunk", "chunk", "chunk", "finished"]
    assert answer.text == "abc"
    assert answer.started.request_id == "r-1"
    assert answer.started.model == "demo"
    (image,) = answer.started.images
    assert (image.width, image.height, image.encoded_side, image.visual_tokens) == (40, 30, 112, 64)
    assert image.source == inference_pb2.FEATURE_SOURCE_ENCODER
    assert len(image.identity) == 64
    assert answer.finished.finish_reason == generation_pb2.FINISH_REASON_END
    assert answer.finished.usage.visual_tokens == 64
    durations = answer.finished.durations
    for stage in ("intake", "preprocess", "encode", "queue", "prefill", "decode", "time_to_first_token", "total"):
        assert getattr(durations, stage).ToNanoseconds() > 0, stage
    assert durations.time_to_first_token.ToNanoseconds() < durations.total.ToNanoseconds()
    assert not answer.finished.degradations


async def test_the_worker_gets_text_images_and_parameters_where_the_message_put_them(rig: Rig) -> None:
    request = ask("before", RED, "between <image>", BLUE, cache_salt="t", priority=generation_pb2.PRIORITY_INTERACTIVE)
    request.sampling.temperature = 0.5
    request.stopping.stop.append("x")
    await rig.answer(request)
    (sent,) = rig.worker.requests
    assert sent.request_id
    assert sent.priority == generation_pb2.PRIORITY_INTERACTIVE
    assert (sent.sampling.temperature, list(sent.stopping.stop)) == (0.5, ["x"])
    assert sent.prompt.cache_salt == "t"
    parts = [(part.WhichOneof("content"), part.text or part.image_index) for part in sent.prompt.messages[0].parts]
    assert parts == [("text", "before"), ("image_index", 0), ("text", "between <image>"), ("image_index", 1)]
    assert [image.token_count for image in sent.prompt.images] == [64, 64]
    red, blue = rig.worker.features[0]
    assert red is not None and blue is not None
    assert red.shape == (64, SPEC.hidden_size)
    assert not np.array_equal(red, blue)


async def test_a_visual_kv_policy_goes_to_probe_and_worker_and_its_report_comes_back(rig: Rig) -> None:
    merge = generation_pb2.VISUAL_KV_POLICY_COMPRESS_VISUAL_MERGE
    rig.worker.visual_kv = generation_pb2.VisualKvReport(policy=merge, lossy=True, saved_bytes=123)
    answer = await rig.answer(ask(RED, "?", visual_kv=merge))
    assert [probe.visual_kv for probe in rig.worker.probes] == [merge]
    assert [request.visual_kv for request in rig.worker.requests] == [merge]
    assert answer.finished.visual_kv == rig.worker.visual_kv
    with pytest.raises(InvalidRequest) as caught:
        await rig.answer(ask(RED, "?", visual_kv=99))
    assert caught.value.reason == "ENUM_INVALID"


async def test_an_image_seen_before_comes_from_the_encoder_cache(rig: Rig) -> None:
    first = await rig.answer(ask(RED, "?"))
    again = await rig.answer(ask(RED, "other question"))
    assert rig.encoder.calls == 1
    assert again.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
    assert again.started.images[0].identity == first.started.images[0].identity


async def test_an_image_that_the_workers_kv_covers_needs_neither_encoder_nor_features(rig: Rig) -> None:
    known = await rig.answer(ask(RED, "?"))
    rig.worker.kv.add(bytes.fromhex(known.started.images[0].identity))
    answer = await rig.answer(ask(RED, BLUE, "?"))
    sources = [image.source for image in answer.started.images]
    assert sources == [inference_pb2.FEATURE_SOURCE_KV_CACHE, inference_pb2.FEATURE_SOURCE_ENCODER]
    red, blue = rig.worker.features[-1]
    assert red is None and blue is not None


async def test_kv_evicted_between_look_up_and_generation_is_encoded_again_unseen_by_the_client(rig: Rig) -> None:
    known = await rig.answer(ask(RED, "?"))
    identity = bytes.fromhex(known.started.images[0].identity)
    rig.worker.kv.add(identity)
    rig.worker.evicted.add(identity)
    answer = await rig.answer(ask(RED, "?"))
    assert answer.order == ["started", "chunk", "chunk", "chunk", "finished"]
    assert rig.worker.features[1] == [None]
    assert rig.worker.features[2][0] is not None


async def test_tenants_with_different_salts_share_nothing(rig: Rig) -> None:
    one = await rig.answer(ask(RED, "?", cache_salt="one"))
    two = await rig.answer(ask(RED, "?", cache_salt="two"))
    assert rig.encoder.calls == 2
    assert one.started.images[0].identity != two.started.images[0].identity


async def test_concurrent_requests_for_one_image_encode_it_once(rig: Rig) -> None:
    rig.encoder.behave = lambda: asyncio.sleep(0.1)
    answers = await asyncio.gather(*(rig.answer(ask(RED, RED, "?")) for _ in range(8)))
    assert rig.encoder.calls == 1
    sources = [image.source for answer in answers for image in answer.started.images]
    assert sources.count(inference_pb2.FEATURE_SOURCE_ENCODER) == 1


@pytest.mark.parametrize("settings", [{"shared_memory": True}])
async def test_features_travel_through_shared_memory_that_is_unlinked(rig: Rig, settings: dict[str, Any]) -> None:
    await rig.answer(ask(RED, "?"))
    sent = rig.worker.requests[0].prompt.images[0].features
    assert sent.WhichOneof("payload") == "shared_memory"
    assert rig.worker.features[0][0] is not None
    assert not is_linked(sent.shared_memory.name)


@pytest.mark.parametrize("settings", [{"shared_memory": True}])
async def test_shared_memory_is_unlinked_when_the_worker_refuses(rig: Rig, settings: dict[str, Any]) -> None:
    rig.worker.refuse = InvalidRequest("no", reason="PROMPT_TOO_LONG")
    assert (await rig.failure(ask(RED, "?"))).reason == "PROMPT_TOO_LONG"
    assert not is_linked(rig.worker.requests[0].prompt.images[0].features.shared_memory.name)


def is_linked(name: str) -> bool:
    return Path(f"/dev/shm/{name}").exists()


async def test_requested_detail_sets_side_and_tokens(rig: Rig) -> None:
    request = ask(RED, "?")
    request.messages[0].parts[0].image.detail = inference_pb2.IMAGE_DETAIL_LOW
    (image,) = (await rig.answer(request)).started.images
    assert (image.encoded_side, image.visual_tokens) == (56, 16)


async def test_a_bad_image_is_named_and_the_next_request_is_unaffected(rig: Rig) -> None:
    error = await rig.failure(ask(RED[:-20], "?"))
    assert isinstance(error, InvalidRequest)
    assert error.reason == "IMAGE_CORRUPT"
    assert (await rig.answer(ask(RED, "?"))).text == "abc"


async def test_a_20_mb_image_gets_through_and_a_larger_one_names_the_limit(rig: Rig) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2600, 2600, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "BMP")
    data = buffer.getvalue()
    assert 20_000_000 < len(data) < 20 << 20
    assert (await rig.answer(ask(data, "?"))).started.images[0].width == 2600
    error = await rig.failure(ask(data + b"\0" * (1 << 20), "?"))
    assert error.reason == "IMAGE_TOO_LARGE"
    assert "max_image_bytes=20971520" in error.message


@pytest.mark.parametrize("settings", [{"max_inflight": 16, "encoder_cache_bytes": 4096}])
async def test_200_image_requests_at_once_are_each_answered_or_refused(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = lambda: asyncio.sleep(0.02)

    async def one(number: int) -> str:
        try:
            return (await rig.answer(ask(png((number, 0, 0)), "?"))).text
        except Overloaded as error:
            return error.reason

    results = await asyncio.gather(*(one(number) for number in range(200)))
    assert set(results) == {"abc", "OVERLOADED"}
    assert results.count("abc") >= 16


@pytest.mark.parametrize("settings", [{"max_inflight_image_bytes": 2048}])
async def test_images_that_can_never_fit_are_refused_with_the_knobs_name(rig: Rig, settings: dict[str, Any]) -> None:
    error = await rig.failure(ask(b"\0" * 3000, "?"))
    assert error.reason == "IMAGES_TOO_LARGE"
    assert "max_inflight_image_bytes=2048" in error.message


async def test_get_model_describes_worker_and_encoder_together(rig: Rig) -> None:
    model = await rig.stub.GetModel(inference_pb2.GetModelRequest())
    assert (model.name, model.fingerprint, model.context_tokens) == ("demo", "cafe", 512)
    assert (model.native_image_side, model.native_visual_tokens, model.encoder_version) == (112, 64, "1")
    assert model.max_images == 8


async def test_a_text_only_model_is_ready_without_an_encoder_and_refuses_pictures(rig: Rig) -> None:
    rig.worker.text_only = True
    rig.encoder.ready, rig.encoder.spec = False, None
    await until(lambda: rig.router.readiness.ready)
    await asyncio.sleep(0.3)
    assert rig.router.readiness.ready
    model = await rig.stub.GetModel(inference_pb2.GetModelRequest())
    assert (model.name, model.max_images, model.native_image_side) == ("demo", 0, 0)
    assert (await rig.answer(ask("no picture"))).text == "abc"
    assert (await rig.failure(ask(RED, "?"))).reason == "IMAGES_UNSUPPORTED"
