"""Ends a streaming call whose peer has stopped answering, at no cost for each event."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from triptych.errors import TriptychError

_LIVENESS_CHECK_S = 0.25


class CallWatch:
    """Reads one call's events. A timer, not each read, looks at the deadline and for signs of life."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[Any, Any]", dead: Callable[[], TriptychError | None]) -> None:
        """`dead` returns what is wrong with the peer, if something is. Close the watch at the call's end."""
        self._call = call
        self._dead = dead
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self._failure: TriptychError | None = None
        self._due_s, self._late = float("inf"), TriptychError("late")
        self._timer = self._loop.call_later(_LIVENESS_CHECK_S, self._look)

    def expect(self, within_s: float, late: TriptychError) -> None:
        """Sets the deadline of the next events; `late` is raised when `read` waits beyond it."""
        self._due_s, self._late = self._loop.time() + within_s, late
        if self._due_s < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._due_s, self._look)

    async def read(self) -> Any:
        """Returns the next event or the stream's end as `call.read` does. Raises what it raises, `late`, or `dead`."""
        self._reading = True
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._failure is None or (task is not None and task.cancelling()):
                raise
            raise self._failure from None
        finally:
            self._reading = False

    def close(self) -> None:
        """Ends the watch, and the call if it still runs."""
        self._timer.cancel()
        self._call.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        # A caller who does not read is no reason to blame the peer.
        self._failure = (self._late if now_s >= self._due_s else self._dead()) if self._reading else None
        if self._failure is not None:
            self._call.cancel()
            return
        wait_s = max(self._due_s - now_s, 0.0) or _LIVENESS_CHECK_S
        self._timer = self._loop.call_later(min(wait_s, _LIVENESS_CHECK_S), self._look)
