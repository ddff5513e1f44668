"""The router as the gateway sees it: one channel, three questions."""

import asyncio
import time
from collections.abc import AsyncGenerator

import grpc
from opentelemetry.context import Context

from triptych.rpc.channel import open_channel
from triptych.rpc.health import answers_serving
from triptych.rpc.status import from_rpc_error
from triptych.telemetry.tracing import inject
from triptych.v1 import inference_pb2
from triptych.v1.inference_pb2_grpc import InferenceServiceStub

MODEL_FRESH_S = 2.0
"""Seconds for which the model's description is used again."""
MODEL_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0


class RouterClient:
    """One router. Create and use it in one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = InferenceServiceStub(self._channel)
        self._model: inference_pb2.Model | None = None
        self._model_seen_s = 0.0
        self._asking = asyncio.Lock()

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, trace: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields a generation's events; closing the generator cancels the call. Raises what the router raised."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=inject(trace))
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def model(self) -> inference_pb2.Model:
        """Describes the served model, at most MODEL_FRESH_S old; older while the router cannot say.

        Text is served when the encoder is down, so a name once learnt stays good. Raises Unavailable when there is
        none.
        """
        async with self._asking:
            if self._model is None or time.monotonic() - self._model_seen_s > MODEL_FRESH_S:
                try:
                    self._model = await self._stub.GetModel(inference_pb2.GetModelRequest(), timeout=MODEL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    if self._model is None:
                        raise from_rpc_error(error) from None
                self._model_seen_s = time.monotonic()
            return self._model

    async def ready(self) -> bool:
        """Tells whether the router says that a request would be served."""
        return await answers_serving(self._channel, READY_TIMEOUT_S)

    async def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        await self._channel.close()
