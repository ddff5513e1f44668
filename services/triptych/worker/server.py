"""The worker's process: a gRPC server, the engine's thread, and health that follows the engine."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from grpc_health.v1 import health

from triptych.config import WorkerSettings
from triptych.rpc.channel import bind, create_server, set_serving
from triptych.serving import serve_until_stopped
from triptych.telemetry.metrics import served_metrics
from triptych.v1 import worker_pb2_grpc
from triptych.worker.drafts import Drafts
from triptych.worker.engine.thread import EngineThread
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.metrics import cache_registry
from triptych.worker.service import WorkerService

log = logging.getLogger(__name__)

SERVICE_NAME = "triptych.v1.WorkerService"

_HEALTH_INTERVAL_S = 0.25
_STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker.

    Attributes:
        port: Where it listens.
        model: What it serves.
        engine: Its engine's thread.
        drafts: The generations that wait for a verdict on their features.
    """

    port: int
    model: LoadedModel
    engine: EngineThread
    drafts: Drafts


@contextlib.asynccontextmanager
async def run_worker(settings: WorkerSettings) -> AsyncIterator[Worker]:
    """Runs a worker while the context is entered; on exit, running requests get a few seconds to end.

    The port is taken first and answers once the model is loaded. Health is SERVING as long as the engine makes
    progress. Raises OSError when the port is taken, and what `load_model` raises.
    """
    server, servicer = create_server([SERVICE_NAME])
    port = bind(server, settings.host, settings.port)
    model = await asyncio.to_thread(load_model, settings)
    engine = EngineThread(model.engine)
    service = WorkerService(model, engine, settings)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    engine.start()
    await set_serving(servicer, [SERVICE_NAME], True)
    await server.start()
    monitor = asyncio.create_task(_follow_health(service, servicer))
    try:
        with served_metrics(cache_registry(model.engine), settings.host, settings.metrics_port):
            yield Worker(port, model, engine, service.drafts)
    finally:
        monitor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await monitor
        await set_serving(servicer, [SERVICE_NAME], False)
        service.stop()
        await server.stop(_STOP_GRACE_S)
        await engine.stop()
        await asyncio.to_thread(model.engine.close)


async def serve(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT. Call it with `asyncio.run`."""
    await serve_until_stopped(
        "worker", run_worker(settings), lambda worker: f"serving {worker.model.name} on {settings.host}:{worker.port}"
    )


async def _follow_health(service: WorkerService, servicer: health.aio.HealthServicer) -> None:
    """Keeps health at what the engine does."""
    serving = True
    while True:
        await asyncio.sleep(_HEALTH_INTERVAL_S)
        if service.makes_progress() != serving:
            serving = not serving
            await set_serving(servicer, [SERVICE_NAME], serving)
            log.log(
                logging.INFO if serving else logging.ERROR, "the engine %s", "works again" if serving else "is stuck"
            )
