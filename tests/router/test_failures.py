import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.router.conftest import Rig, until
from tests.router.fakes import ask, png, start_worker
from triptych.errors import InvalidRequest, Overloaded, StageTimeout, TriptychError, Unavailable
from triptych.v1 import inference_pb2

pytestmark = pytest.mark.slow

RED = png((255, 0, 0))
FORBID = inference_pb2.DEGRADATION_POLICY_FORBID


def hang() -> Any:
    return asyncio.sleep(3600)


def fail(error: TriptychError) -> Any:
    async def raise_it() -> None:
        raise error

    return raise_it


async def health_of(rig: Rig) -> int:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service="triptych.v1.InferenceService"))
    return int(response.status)


@pytest.mark.parametrize("settings", [{"encode_timeout_s": 0.2}])
async def test_late_encoding_gives_a_text_only_answer_that_says_so(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = hang
    answer = await rig.answer(ask(RED, "what?"))
    assert answer.text == "abc"
    (degradation,) = answer.finished.degradations
    assert degradation.kind == inference_pb2.DEGRADATION_KIND_TEXT_ONLY
    assert "encode_timeout_s" in degradation.explanation
    (image,) = answer.started.images
    assert image.source == inference_pb2.FEATURE_SOURCE_UNSPECIFIED
    assert image.visual_tokens == 0
    (sent,) = rig.worker.requests
    assert not sent.prompt.images
    assert [part.text for part in sent.prompt.messages[0].parts] == ["what?"]


@pytest.mark.parametrize("settings", [{"encode_timeout_s": 0.2}])
async def test_late_encoding_is_an_error_for_callers_who_forbid_degradation(rig: Rig, settings: dict[str, Any]) -> None:
    rig.encoder.behave = hang
    error = await rig.failure(ask(RED, "?", degradation_policy=FORBID))
    assert isinstance(error, StageTimeout)
    assert error.reason == "ENCODE_TIMEOUT"
    assert not rig.worker.requests


async def test_a_dead_encoder_is_unavailable_but_text_is_still_answered(rig: Rig) -> None:
    rig.encoder.behave = fail(Unavailable("gone", reason="ENCODER_UNAVAILABLE"))
    error = await rig.failure(ask(RED, "?"))
    assert isinstance(error, Unavailable)
    assert error.reason == "ENCODER_UNAVAILABLE"
    rig.encoder.ready = False
    await until(lambda: not rig.router.readiness.ready)
    assert await health_of(rig) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await rig.answer(ask("no picture"))).text == "abc"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.GetModel(inference_pb2.GetModelRequest())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    rig.encoder.ready = True
    rig.encoder.behave = lambda: asyncio.sleep(0)
    await until(lambda: rig.router.readiness.ready)
    assert (await rig.answer(ask(RED, "?"))).text == "abc"


async def test_an_encoder_that_was_never_reached_is_unavailable(rig: Rig) -> None:
    rig.encoder.spec = None
    assert (await rig.failure(ask(RED, "?"))).reason == "ENCODER_UNAVAILABLE"
    assert (await rig.answer(ask("text"))).text == "abc"


async def test_a_full_encoder_queue_is_an_overload(rig: Rig) -> None:
    rig.encoder.behave = fail(Overloaded("full", reason="ENCODER_OVERLOADED"))
    error = await rig.failure(ask(RED, "?"))
    assert isinstance(error, Overloaded)
    assert error.reason == "ENCODER_OVERLOADED"


@pytest.mark.parametrize("settings", [{"queue_timeout_s": 0.2, "prefill_timeout_s": 0.2}])
async def test_no_first_token_in_time_is_a_prefill_timeout(rig: Rig, settings: dict[str, Any]) -> None:
    rig.worker.before_first = hang
    error = await rig.failure(ask("?"))
    assert isinstance(error, StageTimeout)
    assert error.reason == "PREFILL_TIMEOUT"
    await until(lambda: rig.worker.running == 0)


@pytest.mark.parametrize("settings", [{"next_token_timeout_s": 0.3}])
async def test_a_gap_between_events_counts_as_a_lost_worker(rig: Rig, settings: dict[str, Any]) -> None:
    rig.worker.between = lambda index: asyncio.sleep(3600 if index == 2 else 0)
    error = await rig.failure(ask("?"))
    assert isinstance(error, Unavailable)
    assert error.reason == "WORKER_UNAVAILABLE"
    await until(lambda: rig.worker.running == 0)


@pytest.mark.parametrize("settings", [{"worker_silence_s": 0.5}])
async def test_a_worker_that_falls_silent_fails_its_requests_and_health_until_it_comes_back(
    rig: Rig, settings: dict[str, Any]
) -> None:
    rig.worker.before_first = hang
    waiting = asyncio.create_task(rig.failure(ask("?")))
    await until(lambda: rig.worker.running == 1)
    rig.worker.silent.set()
    error = await asyncio.wait_for(waiting, 3)
    assert error.reason == "WORKER_UNAVAILABLE"
    await until(lambda: not rig.router.readiness.ready)
    assert await health_of(rig) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await rig.failure(ask("?"))).reason == "WORKER_UNAVAILABLE"
    rig.worker.silent.clear()
    rig.worker.before_first = lambda: asyncio.sleep(0)
    await until(lambda: rig.router.readiness.ready)
    assert (await rig.answer(ask("?"))).text == "abc"


async def test_a_worker_that_dies_in_mid_stream_is_a_typed_error_at_once_and_a_new_one_is_found(rig: Rig) -> None:
    rig.worker.between = lambda index: asyncio.sleep(3600 if index == 1 else 0)
    waiting = asyncio.create_task(rig.failure(ask("?")))
    await until(lambda: rig.worker.running == 1)
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await rig.worker_server.stop(None)
    error = await waiting
    assert time.monotonic() - started < 2.5
    assert isinstance(error, Unavailable)
    assert error.reason == "WORKER_UNAVAILABLE"
    await until(lambda: not rig.router.readiness.ready)
    assert (await rig.failure(ask("?"))).reason == "WORKER_UNAVAILABLE"
    rig.worker.between = lambda index: asyncio.sleep(0)
    rig.worker_server, _ = await start_worker(rig.worker, rig.worker_port)
    await until(lambda: rig.router.readiness.ready)
    assert (await rig.answer(ask("?"))).text == "abc"


async def test_an_encoder_that_does_not_fit_the_model_is_reported(rig: Rig) -> None:
    rig.worker.hidden_size = 7
    await until(lambda: not rig.router.readiness.ready)
    assert (await rig.failure(ask(RED, "?"))).reason == "MODEL_MISMATCH"


async def test_a_failing_kv_look_up_costs_an_encode_not_the_request(rig: Rig) -> None:
    rig.worker.probe = fail(TriptychError("boom"))
    assert (await rig.answer(ask(RED, "?"))).text == "abc"
    rig.worker.probe = fail(InvalidRequest("too long", reason="PROMPT_TOO_LONG"))
    assert (await rig.failure(ask(RED, "?"))).reason == "PROMPT_TOO_LONG"


async def test_errors_of_the_worker_keep_their_reason(rig: Rig) -> None:
    rig.worker.before_first = fail(InvalidRequest("too long", reason="PROMPT_TOO_LONG"))
    error = await rig.failure(ask("?"))
    assert isinstance(error, InvalidRequest)
    assert error.reason == "PROMPT_TOO_LONG"
    rig.worker.before_first = fail(Overloaded("no blocks"))
    assert (await rig.failure(ask("?"))).reason == "OVERLOADED"


@pytest.mark.parametrize("stage", ["encode", "probe", "prefill", "decode"])
async def test_a_cancelled_call_stops_the_work_in_every_stage(rig: Rig, stage: str) -> None:
    hooks: dict[str, tuple[Any, str]] = {
        "encode": (rig.encoder, "behave"),
        "probe": (rig.worker, "probe"),
        "prefill": (rig.worker, "before_first"),
    }
    if stage in hooks:
        setattr(*hooks[stage], hang)
    else:
        rig.worker.between = lambda index: asyncio.sleep(3600 if index == 1 else 0)
    call = rig.stub.Generate(ask(RED, "?"))
    reading = asyncio.ensure_future(_drain(call))
    busy = {
        "encode": lambda: rig.encoder.running == 1,
        "probe": lambda: rig.router.pipeline.admission.requests == 1,
    }.get(stage, lambda: rig.worker.running == 1)
    await until(busy)
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: rig.router.pipeline.admission.requests == 0, 1.0)
    await until(lambda: rig.worker.running == 0 and rig.encoder.running == 0, 1.0)
    rig.router.pipeline.check_integrity()


async def test_a_client_that_reads_nothing_and_leaves_frees_everything(rig: Rig) -> None:
    rig.worker.words = ["x" * 100_000] * 200  # Far more than flow control lets pass.
    call = rig.stub.Generate(ask(RED, "?"))
    await call.read()
    await asyncio.sleep(0.5)
    assert rig.worker.running == 1
    call.cancel()
    await until(lambda: rig.router.pipeline.admission.requests == 0, 1.0)
    await until(lambda: rig.worker.running == 0, 1.0)


async def test_the_clients_deadline_ends_the_work(rig: Rig) -> None:
    rig.encoder.behave = hang
    error = await rig.failure(ask(RED, "?"), timeout=0.3)
    assert isinstance(error, StageTimeout)
    await until(lambda: rig.router.pipeline.admission.requests == 0 and rig.encoder.running == 0, 1.0)
    assert not rig.worker.requests


async def test_one_cancelled_request_does_not_take_the_shared_encode_away_from_another(rig: Rig) -> None:
    gate = asyncio.Event()
    rig.encoder.behave = gate.wait
    first = rig.stub.Generate(ask(RED, "?"))
    reading = asyncio.ensure_future(_drain(first))
    await until(lambda: rig.encoder.running == 1)
    second = asyncio.create_task(rig.answer(ask(RED, "?")))
    await asyncio.sleep(0.2)
    first.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: rig.router.pipeline.admission.requests == 1)
    gate.set()
    assert (await second).text == "abc"
    assert rig.encoder.calls == 1


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
