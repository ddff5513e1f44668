"""Responses that end with their client: event streams, and work that is given up when nobody waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.errors import Cancelled
from triptych.gateway.errors import to_json

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns; cancels it and raises Cancelled as soon as the client is gone.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client closed the connection")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Sends pieces as they come. Closes their source at the end, also when the client goes away in the middle."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        # Not through Response's own: that would set a length. Proxies must neither keep nor gather the events.
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        try:
            await while_connected(receive, self._pump(send))
        except (Cancelled, OSError):
            scope["triptych"].client_gone = True
        finally:
            await self._pieces.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
