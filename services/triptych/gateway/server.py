"""The gateway's process: uvicorn with the application."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from triptych.config import GatewaySettings
from triptych.gateway.app import create_app
from triptych.serving import serve_until_stopped

log = logging.getLogger(__name__)

STOP_GRACE_S = 5
"""Seconds that running requests get to finish when the gateway is told to stop."""
BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Seconds an idle connection is kept: longer than clients' pools keep theirs, so that none writes into a closed one."""


class _Server(uvicorn.Server):
    """uvicorn without signal handling of its own, which would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def run_gateway(settings: GatewaySettings, port: int | None = None) -> AsyncIterator[int]:
    """Runs a gateway for the length of the block and yields its port.

    `port` replaces the configured one (0: any free one). Raises OSError when the port is taken.
    """
    listener = _listen(settings.host, settings.port if port is None else port)
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


async def serve(settings: GatewaySettings) -> None:
    """Runs the gateway until SIGTERM or SIGINT, then lets running requests finish for STOP_GRACE_S."""
    await serve_until_stopped("gateway", run_gateway(settings), lambda port: f"listening on {settings.host}:{port}")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
