"""The worker as the router sees it: its signs of life, its KV look-up, its stream of words."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import grpc
from opentelemetry.context import Context

from triptych.errors import StageTimeout, TriptychError, Unavailable
from triptych.router.call_watch import CallWatch
from triptych.rpc.channel import open_channel
from triptych.rpc.status import from_rpc_error
from triptych.telemetry.tracing import inject
from triptych.v1 import generation_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_RECONNECT_S = 0.2
# Statuses that gRPC itself makes when the peer is gone, is going, or never was.
_CONNECTION_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


class WorkerClient:
    """One worker. `watch` must run beside it for `alive`, `load` and `model` to mean anything."""

    def __init__(self, address: str, silence_s: float) -> None:
        self._address = address
        self._silence_s = silence_s
        self._channel = open_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._load: worker_pb2.WorkerLoad | None = None
        self._seen_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether the worker gave a sign of life within the last silence_s; it gives none when its engine hangs."""
        return self._load is not None and time.monotonic() - self._seen_s < self._silence_s

    @property
    def load(self) -> worker_pb2.WorkerLoad | None:
        """The last load reported; None before the first report and after the connection was lost."""
        return self._load

    @property
    def headroom(self) -> float:
        """Share of the worker's KV blocks that no running request holds, 0 to 1; 1 while it is unknown."""
        load = self._load
        return 1.0 if load is None or not load.total_blocks else 1 - load.used_blocks / load.total_blocks

    @property
    def model(self) -> worker_pb2.WorkerModel:
        """The model the worker serves. Raises Unavailable (WORKER_UNAVAILABLE) unless the worker is alive."""
        if self._load is None or not self.alive:
            raise self._lost("no sign of life")
        return self._load.model

    async def watch(self) -> None:
        """Follows the worker's load for ever, reconnecting; the task that runs it is cancelled to stop."""
        while True:
            call = self._stub.WatchLoad(worker_pb2.WatchLoadRequest())
            try:
                # A silent stream is not ended: the engine may come back. A lost host never ends it; start anew then.
                while True:
                    async with asyncio.timeout(3 * self._silence_s):
                        load = await call.read()
                    if not isinstance(load, worker_pb2.WorkerLoad):  # The end of the stream.
                        break
                    if self._load is None:
                        log.info("worker at %s is alive: model %s", self._address, load.model.name)
                    self._load, self._seen_s = load, time.monotonic()
            except (grpc.RpcError, TimeoutError) as error:
                if self._load is not None:
                    log.warning("worker at %s is lost: %s", self._address, _kind(error))
            finally:
                call.cancel()
            self._load = None
            await asyncio.sleep(_RECONNECT_S)

    async def probe(
        self,
        prompt: worker_pb2.Prompt,
        visual_kv: generation_pb2.VisualKvPolicy.ValueType,
        timeout_s: float,
        trace: Context,
    ) -> list[bool]:
        """Returns, per image of the prompt, whether the worker's KV covers it now, so that it needs no features.

        Raises what the worker raised, or Unavailable (WORKER_UNAVAILABLE), or StageTimeout.
        """
        try:
            request = worker_pb2.ProbeCacheRequest(prompt=prompt, visual_kv=visual_kv)
            response = await self._stub.ProbeCache(request, timeout=timeout_s, metadata=inject(trace))
        except grpc.RpcError as error:
            raise self._translated(error) from None
        return list(response.images_covered)

    async def settle(self, verdict: worker_pb2.SettleDraftRequest, timeout_s: float, trace: Context) -> int:
        """Gives a verdict on a draft and returns how many tokens had been computed from it.

        Raises what the worker raised, InvalidRequest (DRAFT_UNKNOWN) among it, or Unavailable, or StageTimeout.
        """
        try:
            response = await self._stub.SettleDraft(verdict, timeout=timeout_s, metadata=inject(trace))
        except grpc.RpcError as error:
            raise self._translated(error) from None
        return response.drafted_tokens

    async def generate(
        self, request: worker_pb2.WorkerGenerateRequest, trace: Context, first_token_s: float, next_event_s: float
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """Yields the worker's events. Closing the generator cancels the call.

        Raises what the worker raised; StageTimeout (PREFILL_TIMEOUT) when the first event after `started` takes
        longer than first_token_s; Unavailable (WORKER_UNAVAILABLE) when the connection breaks, the worker gives no
        more signs of life, or a later event takes longer than next_event_s.
        """
        call = self._stub.Generate(request, metadata=inject(trace))
        watch = CallWatch(call, lambda: None if self.alive else self._lost("no sign of life"))
        watch.expect(
            first_token_s,
            StageTimeout(
                f"no first token within {first_token_s:.3g} s (queue_timeout_s + prefill_timeout_s, or what the "
                "call's own deadline left of it)",
                reason="PREFILL_TIMEOUT",
            ),
        )
        late = self._lost(f"no event for next_token_timeout_s={next_event_s:g}")
        try:
            while isinstance(event := await watch.read(), worker_pb2.WorkerGenerateResponse):
                yield event
                if event.WhichOneof("event") != "started":
                    watch.expect(next_event_s, late)
        except grpc.RpcError as error:
            raise self._translated(error) from None
        finally:
            watch.close()

    async def close(self) -> None:
        """Ends all connections."""
        await self._channel.close()

    def _translated(self, error: grpc.RpcError) -> TriptychError:
        translated = from_rpc_error(error)
        ours = translated.reason != type(translated).default_reason
        if not ours and isinstance(error, grpc.aio.AioRpcError) and error.code() in _CONNECTION_CODES:
            return self._lost(error.details() or error.code().name)
        return translated

    def _lost(self, why: str) -> Unavailable:
        return Unavailable(f"the worker at {self._address} does not answer: {why}", reason="WORKER_UNAVAILABLE")


def _kind(error: Exception) -> str:
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
