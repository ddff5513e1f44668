"""Whether the router can serve: the worker gives signs of life, the encoder answers, and the two fit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from triptych.router.worker_client import WorkerClient
from triptych.vision.encoder import Encoder

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two questions to the encoder."""

LOOK_S = 0.1
"""Seconds between two looks at what is known of encoder and worker."""

REFRESH_TIMEOUT_S = 2.0
"""Seconds after which an encoder that does not answer counts as lost."""


class Readiness:
    """Watches encoder and worker and reports each change.

    Ready means able to serve pictures, unless the worker's model takes none. Text-only requests are served whenever the
    worker is alive.
    """

    def __init__(self, encoder: Encoder, worker: WorkerClient, report: Callable[[bool], Awaitable[None]]) -> None:
        self._encoder = encoder
        self._worker = worker
        self._report = report
        self._ready = False

    @property
    def ready(self) -> bool:
        """What was last reported; False before the first look."""
        return self._ready

    async def watch(self) -> None:
        """Looks every LOOK_S, for ever; the task that runs it is cancelled to stop."""
        refresh_due_s = 0.0
        while True:
            if time.monotonic() >= refresh_due_s:
                await self._encoder.refresh(REFRESH_TIMEOUT_S)
                refresh_due_s = time.monotonic() + REFRESH_S
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        reason = self._obstacle()
        if self._ready == (reason is None):
            return
        self._ready = reason is None
        if reason is None:
            log.info("ready")
        else:
            log.warning("not ready: %s", reason)
        await self._report(self._ready)

    def _obstacle(self) -> str | None:
        """Returns what keeps the router from serving, or None."""
        if not self._worker.alive:
            return "the worker gives no sign of life"
        if self._worker.model.text_only:
            return None
        if not self._encoder.ready or self._encoder.spec is None:
            return "the encoder does not answer"
        if self._worker.model.hidden_size != self._encoder.spec.hidden_size:
            return "the encoder's features do not fit the worker's model"
        return None
