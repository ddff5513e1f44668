"""Errors keep their class, message and reason over a real connection."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from triptych import errors
from triptych.rpc.channel import bind, create_server, open_channel, set_serving
from triptych.rpc.health import is_serving
from triptych.rpc.status import from_rpc_error
from triptych.v1 import inference_pb2, inference_pb2_grpc

SERVICE = "triptych.v1.InferenceService"

ERRORS = [
    errors.InvalidRequest("say less"),
    errors.InvalidImage("cut off", reason="IMAGE_CORRUPT"),
    errors.Overloaded("later"),
    errors.Unavailable("gone", reason="ENCODER_UNAVAILABLE"),
    errors.StageTimeout("late", reason="ENCODE_TIMEOUT"),
    errors.FeaturesRequired("again"),
    errors.Cancelled("bye"),
    errors.TriptychError("our fault"),
]


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    """Raises ERRORS[int(request_id)], or what is not one of ours."""

    def _fail(self, request_id: str) -> None:
        if request_id == "bug":
            raise ZeroDivisionError("a secret prompt")
        raise ERRORS[int(request_id)]

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        self._fail(request.request_id)

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: object) -> inference_pb2.Model:
        raise errors.Unavailable("not yet")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server, health = create_server([SERVICE])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Failing(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await set_serving(health, [SERVICE], True)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def fail(address: str, request_id: str) -> grpc.aio.AioRpcError:
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(request_id=request_id)):
                pass
        return caught.value


@pytest.mark.parametrize("number", range(len(ERRORS)))
async def test_an_error_arrives_with_its_message_and_reason(address: str, number: int) -> None:
    sent = ERRORS[number]
    got = from_rpc_error(await fail(address, str(number)))
    assert (got.message, got.reason) == (sent.message, sent.reason)
    assert isinstance(sent, type(got))


async def test_a_bug_is_internal_and_does_not_leak_its_text(address: str) -> None:
    error = await fail(address, "bug")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")


async def test_nobody_listening_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(inference_pb2.GetModelRequest(), timeout=5)
    assert isinstance(from_rpc_error(caught.value), errors.Unavailable)


async def test_a_taken_port_is_an_error_that_names_it(address: str) -> None:
    server, _ = create_server([])
    with pytest.raises(OSError, match=address):
        bind(server, "127.0.0.1", int(address.rpartition(":")[2]))


async def test_health_and_reflection_answer(address: str) -> None:
    assert await is_serving(address)
    assert not await is_serving("127.0.0.1:1", timeout_s=0.5)
    async with open_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = [service.name async for answer in call for service in answer.list_services_response.service]
    assert SERVICE in names


async def test_a_message_over_grpcs_default_of_4_mib_passes(address: str) -> None:
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        part = inference_pb2.Part(image=inference_pb2.Image(data=bytes(20 << 20)))
        message = inference_pb2.Message(role=inference_pb2.ROLE_USER, parts=[part])
        call = stub.Generate(inference_pb2.GenerateRequest(request_id="0", messages=[message]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
