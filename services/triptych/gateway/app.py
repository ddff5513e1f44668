"""The ASGI application, put together from its routes and layers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triptych import __version__
from triptych.config import GatewaySettings
from triptych.errors import Cancelled, TriptychError
from triptych.gateway import errors
from triptych.gateway.completions import completions_router
from triptych.gateway.document import describe
from triptych.gateway.edge import Edge
from triptych.gateway.gate import Gate
from triptych.gateway.metrics import Metrics
from triptych.gateway.models import models_router
from triptych.gateway.operations import operations_router
from triptych.gateway.page import SystemView, page_router
from triptych.gateway.pictures import PictureFetcher
from triptych.gateway.router_client import RouterClient
from triptych.gateway.services import Services

_ABOUT = "OpenAI's API over Triptych. Triptych's own options and reports are under `triptych`; docs/api.md has more."


def create_app(settings: GatewaySettings) -> FastAPI:
    """Returns the application of one gateway. Run it in one event loop; its connections end with its lifespan."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await services.close()

    services = Services(settings, RouterClient(settings.router), PictureFetcher(settings), metrics)
    app = FastAPI(
        title="Triptych",
        version=__version__,
        description=_ABOUT,
        lifespan=lifespan,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    keyed = [Security(HTTPBearer(auto_error=False, description="an API key"))] if settings.api_keys else []
    app.include_router(completions_router(services), dependencies=keyed)
    app.include_router(models_router(services), dependencies=keyed)
    app.include_router(operations_router(services))
    view = SystemView(settings.router, settings.worker, lambda: metrics.inside)
    app.include_router(page_router(view, settings.jaeger_url))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(TriptychError, _triptych_error)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    app.add_middleware(Edge, metrics=metrics)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's own way to change it.
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return errors.from_http(error, request.method, request.url.path).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return errors.from_validation(error.errors()).response()


async def _triptych_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    if isinstance(error, Cancelled):
        request.scope["triptych"].client_gone = True
    return errors.from_triptych(error).response()
