"""The router's process: InferenceService over gRPC."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc

from triptych.config import RouterSettings
from triptych.errors import InvalidRequest, Unavailable
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline, model_mismatch
from triptych.router.readiness import Readiness
from triptych.router.worker_client import WorkerClient
from triptych.rpc.channel import bind, create_server, set_serving
from triptych.serving import serve_until_stopped
from triptych.telemetry.metrics import served_metrics
from triptych.telemetry.tracing import extract
from triptych.v1 import inference_pb2, inference_pb2_grpc
from triptych.vision.dispatcher import ScheduledEncoder
from triptych.vision.encoder import Encoder, TritonEncoder
from triptych.vision.metrics import VisionMetrics
from triptych.vision.pool import EncoderPool
from triptych.vision.scheduler import Limits

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
STOP_GRACE_S = 5.0
"""Seconds that running requests get to finish when the router is told to stop."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Translates between gRPC and the pipeline; nothing else."""

    def __init__(self, pipeline: Pipeline, encoder: Encoder, worker: WorkerClient, settings: RouterSettings) -> None:
        self._pipeline = pipeline
        self._encoder = encoder
        self._worker = worker
        self._settings = settings

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        caller = extract(context.invocation_metadata())
        events = self._pipeline.generate(request, caller, context.time_remaining())
        async with aclosing(events):
            async for event in events:
                yield event

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> inference_pb2.Model:
        """See inference.proto."""
        model, spec = self._worker.model, self._encoder.spec
        if model.text_only:
            return inference_pb2.Model(
                name=model.name, fingerprint=model.fingerprint, context_tokens=model.context_tokens
            )
        if spec is None or not self._encoder.ready:
            raise Unavailable("the vision encoder does not answer", reason="ENCODER_UNAVAILABLE")
        if model.hidden_size != spec.hidden_size:
            raise model_mismatch(model)
        return inference_pb2.Model(
            name=model.name,
            fingerprint=model.fingerprint,
            context_tokens=model.context_tokens,
            native_image_side=spec.image_side,
            native_visual_tokens=spec.token_count(spec.image_side),
            max_images=self._settings.max_images,
            encoder_version=spec.version,
        )


class Router:
    """A running router.

    Attributes:
        port: The port it listens on.
        pipeline: What runs the requests; asked for `check_integrity()`.
        readiness: Whether pictures can be served.
        metrics: What Prometheus is told.
    """

    def __init__(self, port: int, pipeline: Pipeline, readiness: Readiness, metrics: RouterMetrics) -> None:
        self.port = port
        self.pipeline = pipeline
        self.readiness = readiness
        self.metrics = metrics


@asynccontextmanager
async def run_router(
    settings: RouterSettings,
    encoder: Encoder | None = None,
    port: int | None = None,
    draft_encoder: Encoder | None = None,
) -> AsyncIterator[Router]:
    """Runs a router for the length of the block and yields it.

    It listens at once; health turns SERVING when encoder and worker answer. `encoder` and
    `draft_encoder` replace Triton, `port` the configured one (0: any free one). Raises OSError when the port is taken.
    """
    async with AsyncExitStack() as stack:
        metrics = RouterMetrics()
        encoder = encoder or scheduled_encoder(settings, settings.vision_model, metrics.vision)
        stack.push_async_callback(encoder.close)
        draft_encoder = draft_encoder or scheduled_encoder(settings, settings.draft_model)
        stack.push_async_callback(draft_encoder.close)
        worker = WorkerClient(settings.worker, settings.worker_silence_s)
        stack.push_async_callback(worker.close)
        pipeline = Pipeline(settings, encoder, draft_encoder, worker, metrics)
        stack.callback(pipeline.close)
        server, health = create_server([SERVICE])
        servicer = InferenceServicer(pipeline, encoder, worker, settings)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        bound = bind(server, settings.host, settings.port if port is None else port)
        stack.enter_context(served_metrics(metrics.registry, settings.host, settings.metrics_port))
        await set_serving(health, [SERVICE], False)
        readiness = Readiness(encoder, worker, lambda ready: set_serving(health, [SERVICE], ready))
        for watch in (worker.watch(), readiness.watch()):
            stack.push_async_callback(_cancel, asyncio.create_task(watch))
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(health.enter_graceful_shutdown)
        yield Router(bound, pipeline, readiness, metrics)


def scheduled_encoder(settings: RouterSettings, model: str, metrics: VisionMetrics | None = None) -> ScheduledEncoder:
    """Returns a model of the Tritons that the settings name, behind one scheduler."""
    limits = Limits(
        settings.encode_pixel_budget,
        settings.encode_max_inflight,
        settings.encode_batch_timeout_s,
        settings.encode_lift_s,
    )
    addresses, counters = _listed(settings.triton), _listed(settings.triton_metrics)
    if counters and len(counters) != len(addresses):
        raise InvalidRequest(f"triton names {len(addresses)} addresses, triton_metrics {len(counters)}")
    pool = EncoderPool(
        [
            TritonEncoder(
                address,
                model,
                shared_memory=settings.encode_shared_memory,
                metrics_address=counters[index] if counters else None,
            )
            for index, address in enumerate(addresses)
        ]
    )
    return ScheduledEncoder(pool, limits, settings.encode_max_pixels, settings.encode_max_waiting, metrics)


def _listed(addresses: str) -> list[str]:
    return [address.strip() for address in addresses.split(",") if address.strip()]


async def serve(settings: RouterSettings) -> None:
    """Runs the router until SIGTERM or SIGINT, then lets running requests finish for STOP_GRACE_S."""
    await serve_until_stopped(
        "router", run_router(settings), lambda router: f"listening on {settings.host}:{router.port}"
    )


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
