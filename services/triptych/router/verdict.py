"""A worker's events beside the task that gives it its verdict on a draft."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Self

from triptych.v1 import worker_pb2


class WithVerdict:
    """Iterates over a worker's events; a verdict that fails, while they are waited for, is raised in their place.

    Close it, so that nothing of a verdict goes on behind it.
    """

    def __init__(self, events: AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]) -> None:
        self._events = events
        self._verdict: asyncio.Task[None] | None = None

    def await_beside(self, verdict: Coroutine[Any, Any, None]) -> None:
        """Runs the verdict beside the events; at most once."""
        self._verdict = asyncio.create_task(verdict, name="verdict")

    async def settled(self) -> None:
        """Waits for the verdict, if there is one. Raises what it raises."""
        if self._verdict is not None:
            await self._verdict

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> worker_pb2.WorkerGenerateResponse:
        if self._verdict is None or self._verdict.done():
            await self.settled()
            return await anext(self._events)
        reading = asyncio.create_task(_next(self._events))
        try:
            await asyncio.wait({reading, self._verdict}, return_when=asyncio.FIRST_COMPLETED)
            if self._verdict.done():
                await self._verdict
            event = await reading
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Cancels the verdict if it still runs."""
        if self._verdict is not None:
            self._verdict.cancel()
            await asyncio.gather(self._verdict, return_exceptions=True)


async def _next(
    events: AsyncGenerator[worker_pb2.WorkerGenerateResponse, None],
) -> worker_pb2.WorkerGenerateResponse | None:
    return await anext(events, None)
