"""Who may enter /v1, how many at once, and how much each may bring: decided before a body is read."""

import asyncio
import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.config import GatewaySettings
from triptych.gateway.errors import ApiError, overloaded
from triptych.gateway.metrics import Metrics


class Keys:
    """The API keys that are accepted."""

    def __init__(self, keys: str | None) -> None:
        self._keys = [key.strip() for key in (keys or "").split(",") if key.strip()]

    def tenant_of(self, headers: Headers) -> str:
        """Returns the key a request bears; empty when none is asked for. Raises ApiError (401)."""
        if not self._keys:
            return ""
        scheme, _, offered = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            # All are compared, each in constant time.
            matches = [key for key in self._keys if hmac.compare_digest(key.encode(), offered.strip().encode())]
            if matches:
                return matches[0]
        what = "Incorrect API key provided" if offered else "You didn't provide an API key; send Authorization: Bearer"
        raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class Gate:
    """ASGI middleware in front of /v1."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._keys = Keys(settings.api_keys.get_secret_value() if settings.api_keys else None)
        self._metrics = metrics
        self._bodies = BodyBytes(max(settings.max_inflight_body_bytes, settings.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers 401, 413 or 429."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            scope["triptych"].tenant = self._keys.tenant_of(headers)
            if self._metrics.inside >= self._settings.max_inflight:
                raise overloaded(f"max_inflight={self._settings.max_inflight} requests are in flight; try again later")
            limited = LimitedBody(receive, headers, self._settings, self._bodies)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._metrics.inside += 1
        try:
            await self._app(scope, limited, send)
        finally:
            self._metrics.inside -= 1
            limited.release()


class BodyBytes:
    """Bytes of all bodies in flight: one lives as long as its request. Used from one event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def take(self, size: int) -> None:
        """Books bytes. Raises ApiError (429) when there is no room."""
        if self._taken + size > self._limit:
            raise overloaded(f"bodies in flight would exceed max_inflight_body_bytes={self._limit}; try again later")
        self._taken += size

    def give_back(self, size: int) -> None:
        """Books them out."""
        self._taken -= size


class LimitedBody:
    """A request's `receive` that refuses too many bytes (413, 429) and too slow ones (408)."""

    def __init__(self, receive: Receive, headers: Headers, settings: GatewaySettings, bodies: BodyBytes) -> None:
        """Raises ApiError at once when the declared length is too much."""
        self._receive = receive
        self._max_bytes = settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s
        self._deadline_s = time.monotonic() + settings.body_timeout_s
        self._bodies = bodies
        self._booked = 0
        self._came = 0
        self._complete = False
        declared = headers.get("content-length", "")
        if declared.isdecimal():
            self._book(int(declared))

    async def __call__(self) -> Message:
        """Returns the next message. Raises ApiError."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within body_timeout_s={self._timeout_s:g}",
                type="timeout_error",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._came += len(message.get("body", b""))
            self._book(self._came)
            self._complete = not message.get("more_body", False)
        return message

    def release(self) -> None:
        """Books the body out; the request has ended."""
        self._bodies.give_back(self._booked)
        self._booked = 0

    def _book(self, size: int) -> None:
        """Books as much as is known of the body's size. Raises ApiError."""
        if size > self._max_bytes:
            raise ApiError(
                413,
                f"the body is larger than max_body_bytes={self._max_bytes}",
                code="request_too_large",
                headers={"Connection": "close"},
            )
        if size > self._booked:
            self._bodies.take(size - self._booked)
            self._booked = size
