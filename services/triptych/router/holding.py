"""The bytes that requests hold between preprocessing and prefill."""

import asyncio
from collections import deque

from triptych.errors import IntegrityError, InvalidRequest, Overloaded


class Hold:
    """A request's share of the bytes, until `release`, which may be called more than once."""

    def __init__(self, holding: "Holding", size_bytes: int) -> None:
        self._holding = holding
        self._size_bytes = size_bytes

    def release(self) -> None:
        """Gives the bytes back; whoever waits next gets them."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        self._holding.give_back(size_bytes)


class Holding:
    """Bounds the pixels and features of requests that wait for encoder and prefill, here and in the worker.

    When the encoder is faster than prefill, requests wait for room here, oldest first, before their images are decoded;
    as they count as in flight, admission then refuses new ones. Used from one event loop only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes held now; never above the limit."""
        return self._held_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    async def acquire(self, size_bytes: int, timeout_s: float) -> Hold:
        """Returns a hold of so many bytes once there is room and everybody before has had theirs.

        Raises InvalidRequest (IMAGES_TOO_LARGE) when there never will be room, Overloaded when there is none in time.
        """
        if size_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the request's images take {size_bytes} bytes as pixels and features, more than "
                f"max_held_bytes={self._max_bytes}",
                reason="IMAGES_TOO_LARGE",
            )
        if self._waiters or self._held_bytes + size_bytes > self._max_bytes:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiter = (size_bytes, turn)
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await turn
            except BaseException as error:
                if turn.done() and not turn.cancelled():  # It got its turn in the same moment.
                    self.give_back(size_bytes)
                else:
                    self._waiters.remove(waiter)
                    self._admit()
                if isinstance(error, TimeoutError):
                    raise Overloaded(
                        f"no room for the images' features within {timeout_s:.3g} s: max_held_bytes={self._max_bytes} "
                        "are held by requests that wait for prefill; try again later"
                    ) from None
                raise
        else:
            self._held_bytes += size_bytes
        return Hold(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Takes bytes back."""
        self._held_bytes -= size_bytes
        self._admit()

    def check_idle(self) -> None:
        """Raises IntegrityError unless nothing is held and nobody waits."""
        if self._held_bytes or self._waiters:
            raise IntegrityError(f"{self._held_bytes} bytes are held and {len(self._waiters)} requests wait for some")

    def _admit(self) -> None:
        while self._waiters and self._held_bytes + self._waiters[0][0] <= self._max_bytes:
            size_bytes, turn = self._waiters.popleft()
            self._held_bytes += size_bytes
            turn.set_result(None)
