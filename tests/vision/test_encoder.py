"""TritonEncoder against a fake KServe server, for time and failure; the real Triton is in tests/stack."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triptych.errors import EncoderChanged, Overloaded, StageTimeout, TriptychError, Unavailable
from triptych.rpc.channel import OPTIONS, bind
from triptych.vision.encoder import TritonEncoder, _in_background
from triptych.vision.encoder_spec import newest, parse_encoder_spec

PARAMETER = {
    "image_side": 28,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": "bicubic",
    "hidden_size": 6,
    "select_strategy": "default",
    "fingerprint": "f00d",
}
PIXELS = np.zeros((3, 28, 28), np.float32)


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    ready: bool = True
    parameter: str = json.dumps(PARAMETER)
    versions: tuple[str, ...] = ("1",)
    features: Any = field(default_factory=lambda: np.ones((1, 4, 6), np.float32))
    failure: tuple[grpc.StatusCode, str] | None = None
    delay_s: float = 0.0
    running: int = 0
    port: int = 0

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelMetadataResponse(name=request.name, versions=self.versions)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        response = service_pb2.ModelConfigResponse()
        if self.parameter:
            response.config.parameters["triptych"].string_value = self.parameter
        return response

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.failure is not None:
            await context.abort(*self.failure)
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        output = response.outputs.add(name="image_features", datatype="FP32", shape=self.features.shape)
        assert output.name
        response.raw_output_contents.append(self.features.tobytes())
        return response


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    server = grpc.aio.server(options=OPTIONS)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield fake
    await server.stop(None)


async def encode(encoder: TritonEncoder, pixels: Any = PIXELS, timeout_s: float = 5.0) -> Any:
    return await encoder.run([pixels], "1", timeout_s)


@pytest.fixture
async def encoder(triton: FakeTriton) -> AsyncIterator[TritonEncoder]:
    client = TritonEncoder(f"127.0.0.1:{triton.port}", "vision")
    await client.refresh(2.0)
    yield client
    await client.close()


async def test_features_come_as_the_spec_promises(encoder: TritonEncoder) -> None:
    assert encoder.ready
    features = await encode(encoder)
    assert features.shape == (1, 4, 6)
    assert features.dtype == np.float32


async def test_a_message_beyond_grpcs_default_limit_passes_both_ways(
    triton: FakeTriton, encoder: TritonEncoder
) -> None:
    triton.parameter = json.dumps(PARAMETER | {"image_side": 1400, "hidden_size": 200})
    assert await encoder.refresh(2.0)
    triton.features = np.ones((1, 10_000, 200), np.float32)
    assert (await encode(encoder, np.zeros((3, 1400, 1400), np.float32), 20.0)).nbytes == 8_000_000


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((0,), np.float32),
        np.zeros((1, 0, 6), np.float32),
        np.ones((1, 5, 6), np.float32),
        np.ones((1, 4, 7), np.float32),
    ],
)
async def test_features_that_are_not_as_promised_are_an_error(
    triton: FakeTriton, encoder: TritonEncoder, features: Any
) -> None:
    triton.features = features
    with pytest.raises(TriptychError) as caught:
        await encode(encoder)
    assert caught.value.reason == "ENCODER_FAILED"


@pytest.mark.parametrize(
    "code, message, error, reason",
    [
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", Overloaded, "ENCODER_OVERLOADED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", Overloaded, "ENCODER_OVERLOADED"),
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", StageTimeout, "ENCODE_TIMEOUT"),
        (grpc.StatusCode.UNAVAILABLE, "model is not ready", Unavailable, "ENCODER_UNAVAILABLE"),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model", EncoderChanged, "ENCODER_CHANGED"),
        (grpc.StatusCode.INTERNAL, "Stub process is not healthy", Unavailable, "ENCODER_UNAVAILABLE"),
        (grpc.StatusCode.INTERNAL, "onnxruntime says no", TriptychError, "ENCODER_FAILED"),
    ],
)
async def test_tritons_errors_get_their_meaning(
    triton: FakeTriton,
    encoder: TritonEncoder,
    code: grpc.StatusCode,
    message: str,
    error: type[TriptychError],
    reason: str,
) -> None:
    triton.failure = (code, message)
    with pytest.raises(error) as caught:
        await encode(encoder)
    assert caught.value.reason == reason


async def test_a_late_encoder_is_a_timeout(triton: FakeTriton, encoder: TritonEncoder) -> None:
    triton.delay_s = 60
    with pytest.raises(StageTimeout) as caught:
        await encode(encoder, timeout_s=0.2)
    assert caught.value.reason == "ENCODE_TIMEOUT"


async def test_cancelling_the_caller_cancels_the_call(triton: FakeTriton, encoder: TritonEncoder) -> None:
    triton.delay_s = 60
    task = asyncio.create_task(encode(encoder, timeout_s=50.0))
    while not triton.running:
        await asyncio.sleep(0.01)
    task.cancel()
    async with asyncio.timeout(2):
        while triton.running:
            await asyncio.sleep(0.01)


async def test_a_call_that_is_given_up_while_its_pixels_are_copied_ends_after_the_copy() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        go_on.wait(5)
        done.set()

    task = asyncio.create_task(_in_background(1 << 30, copy))
    while not begun.is_set():
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_nobody_there_is_unavailable_at_once() -> None:
    encoder = TritonEncoder("127.0.0.1:1", "vision")
    assert not await encoder.refresh(1.0)
    assert not encoder.ready
    with pytest.raises(Unavailable):
        await encode(encoder)
    await encoder.close()


async def test_a_new_version_is_noticed_and_the_spec_outlives_a_lost_encoder(
    triton: FakeTriton, encoder: TritonEncoder
) -> None:
    triton.versions = ("9", "10")
    triton.parameter = json.dumps(PARAMETER | {"fingerprint": "beef"})
    assert await encoder.refresh(2.0)
    spec = newest(encoder.versions)
    assert (spec.version, spec.fingerprint) == ("10", "beef")
    triton.ready = False
    assert not await encoder.refresh(2.0)
    assert newest(encoder.versions) == spec


@pytest.mark.parametrize(
    "parameter, defect",
    [
        ("", "it is missing"),
        ("{", "Expecting"),
        (json.dumps({**PARAMETER, "image_side": 30}), "multiple"),
        (json.dumps({**PARAMETER, "image_std": [0, 1, 1]}), "image_std"),
        (json.dumps({**PARAMETER, "image_mean": [1, 1]}), "not enough values"),
        (json.dumps({**PARAMETER, "resample": "magic"}), "resample"),
        (json.dumps({**PARAMETER, "select_strategy": "some"}), "select_strategy"),
        (json.dumps({**PARAMETER, "hidden_size": 0}), "hidden_size"),
        (json.dumps({key: PARAMETER[key] for key in PARAMETER if key != "patch_size"}), "'patch_size' is missing"),
    ],
)
async def test_a_model_that_was_not_exported_for_us_is_never_ready(
    triton: FakeTriton, encoder: TritonEncoder, parameter: str, defect: str, caplog: pytest.LogCaptureFixture
) -> None:
    triton.parameter = parameter
    assert not await encoder.refresh(2.0)
    assert defect in caplog.text


def test_a_spec_survives_the_way_through_its_parameter() -> None:
    spec = parse_encoder_spec(json.dumps(PARAMETER), "3")
    assert (spec.image_side, spec.version, spec.token_count(28)) == (28, "3", 4)
