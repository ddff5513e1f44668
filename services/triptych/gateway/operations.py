"""GET /health, /ready and /metrics: for load balancers, containers and Prometheus."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from triptych.gateway.replies import Health, error_responses
from triptych.gateway.services import Services


def operations_router(services: Services) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()

    @router.get("/health", response_model=Health, responses=error_responses(500), summary="The gateway lives")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get(
        "/ready",
        response_model=Health,
        responses={**error_responses(500), 503: {"model": Health, "description": "not now"}},
        summary="A request with pictures would be served",
    )
    async def ready() -> Response:
        serving = await services.router.ready()
        return JSONResponse({"status": "ok" if serving else "not ready"}, 200 if serving else 503)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **error_responses(500)},
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        return Response(generate_latest(services.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
