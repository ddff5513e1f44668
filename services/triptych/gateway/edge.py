"""The outermost layer: every request gets an id, a span and its place in the metrics, and every fault an answer."""

import logging
import re
import time
import uuid
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.gateway import errors
from triptych.gateway.metrics import Metrics
from triptych.telemetry.spans import open_span
from triptych.telemetry.tracing import extract

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


@dataclass(slots=True)
class RequestContext:
    """What the layers know of a request; at scope["triptych"].

    Attributes:
        request_id: The client's where it is usable, else one made here; echoed in x-request-id.
        trace: Context whose current span is the request's.
        arrival_s: When it came, on time.monotonic's clock.
        tenant: Whose key it bears; empty when no keys are asked for.
        client_gone: Whether the client left before the end.
    """

    request_id: str
    trace: Context
    arrival_s: float
    tenant: str = ""
    client_gone: bool = False


class Edge:
    """ASGI middleware; the first to see a request and the last to see its answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        arrival_s = time.monotonic()
        named = headers.get(REQUEST_ID_HEADER, "")
        request_id = named if _REQUEST_ID.fullmatch(named) else uuid.uuid4().hex
        if not scope["path"].startswith("/v1/"):
            scope["triptych"] = RequestContext(request_id, Context(), arrival_s)
            await self._serve(scope, receive, send)
            return
        attributes = {"http.request.method": scope["method"]}
        with open_span("gateway.request", extract(headers.items()), SpanKind.SERVER, attributes) as (span, trace):
            context = scope["triptych"] = RequestContext(request_id, trace, arrival_s)
            status = await self._serve(scope, receive, send)
            span.set_attribute("triptych.request_id", context.request_id)
            span.set_attribute("http.route", route_of(scope))
            span.set_attribute("http.response.status_code", status)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that went into the metrics."""
        context: RequestContext = scope["triptych"]
        status = 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = context.request_id
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception as error:
            log.exception("request %s failed", context.request_id)
            if not status:
                await errors.internal(error).response()(scope, receive, told)
        finally:
            if context.client_gone or not status:
                status = errors.CLIENT_CLOSED_REQUEST
            route = route_of(scope)
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - context.arrival_s)
        if status >= 400 and route != "/ready":  # There, "not now" is an answer, asked for again and again.
            log.info("request %s: %d %s", context.request_id, status, route)
        return status


def route_of(scope: Scope) -> str:
    """Returns the route's template, so that metrics have no label per URL."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
