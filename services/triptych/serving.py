"""A service in a process of its own: traces, signals, and an orderly end."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from triptych.telemetry.tracing import setup_tracing

log = logging.getLogger(__name__)

Running = TypeVar("Running")


async def serve_until_stopped(
    name: str, service: AbstractAsyncContextManager[Running], describe: Callable[[Running], str]
) -> None:
    """Runs a service until SIGTERM or SIGINT, then lets it end as its context manager does.

    Traces are exported when the environment asks for it (see telemetry/tracing.py). `describe` says in the log what
    runs, and where.
    """
    provider = setup_tracing(name)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with service as running:
        log.info("%s", describe(running))
        await stop.wait()
        log.info("stopping")
    if provider is not None:
        provider.shutdown()
