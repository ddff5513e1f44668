"""The encoder cache: features by identity, so that one picture is encoded once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from triptych.errors import IntegrityError, StageTimeout
from triptych.vision.shared_features import SharedFeatures

Features = npt.NDArray[Any]
Encode = Callable[[], Awaitable[Features]]


@dataclass(slots=True)
class _Entry:
    features: Features
    references: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """One running encode and how many callers wait for it."""

    task: "asyncio.Task[Features]"
    waiters: int = 0
    encodes: bool = True  # Not when another router had the features.


@dataclass(slots=True, eq=False)
class Lease:
    """A caller's hold on features; they stay in the cache until `release`, which may be called more than once.

    Attributes:
        features: [tokens, hidden_size], read-only.
        encoded: Whether the encoder ran for this caller, rather than before or for another.
    """

    features: Features
    encoded: bool
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Gives the features up."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


class EncoderCache:
    """Features of recent images within a byte budget; concurrent callers for one image share one encode.

    An entry is in use (references >= 1) or idle; idle entries are evicted, longest idle first, when a new one needs
    their room. Features that find no room (larger than the budget, or all else in use) are handed out all the same
    and not kept: nobody ever waits for room.

    Used from one event loop only; there is no lock because no method awaits while the books are in between.
    """

    def __init__(self, budget_bytes: int, shared: SharedFeatures | None = None) -> None:
        """`shared` is asked for what is not here before anything is encoded, and told of what was."""
        self._budget_bytes = budget_bytes
        self._shared = shared
        self._used_bytes = 0
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all kept features, idle ones included; never above the budget."""
        return self._used_bytes

    def __contains__(self, identity: bytes) -> bool:
        """Whether features are kept under an identity now."""
        return identity in self._entries

    async def get(self, identity: bytes, encode: Encode) -> Lease:
        """Returns the features of an image: kept ones, those of a running encode, or what `encode` returns.

        `encode` runs in a task of its own that goes on while anybody waits for it, whoever asked first, and is
        cancelled when nobody does. Its failure reaches everybody who waits and is not remembered. Only its timeout
        does not count for those who joined late: they try again.
        """
        while True:
            if identity in self._entries:
                return self._lease(identity, encoded=False)
            flight = self._flights.get(identity)
            leads = flight is None
            if flight is None:
                flight = self._start(identity, encode)
            flight.waiters += 1
            try:
                features = await asyncio.shield(flight.task)
            except StageTimeout:
                if leads:
                    raise
                continue
            finally:
                flight.waiters -= 1
                if flight.waiters == 0 and not flight.task.done():
                    flight.task.cancel()
                    self._land(identity, flight)
            entry = self._entries.get(identity)
            if entry is not None and entry.features is features:
                return self._lease(identity, encoded=leads and flight.encodes)
            return Lease(features, leads and flight.encodes)

    def close(self) -> None:
        """Ends what it has to do with other routers."""
        if self._shared is not None:
            self._shared.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless bytes, references and the idle order agree and every flight has a waiter."""
        used_bytes = sum(entry.features.nbytes for entry in self._entries.values())
        if used_bytes != self._used_bytes or used_bytes > self._budget_bytes:
            raise IntegrityError(f"encoder cache: {used_bytes} bytes kept, {self._used_bytes} booked")
        if any(entry.references < 0 for entry in self._entries.values()):
            raise IntegrityError("encoder cache: an entry was released more often than leased")
        idle = {identity for identity, entry in self._entries.items() if entry.references == 0}
        if idle != set(self._idle):
            raise IntegrityError("encoder cache: the idle order and the references disagree")
        if any(flight.waiters < 1 and not flight.task.done() for flight in self._flights.values()):
            raise IntegrityError("encoder cache: an encode runs for nobody")

    def check_idle(self) -> None:
        """Raises IntegrityError when anything is leased or encoded although nobody should; implies integrity."""
        self.check_integrity()
        if self._flights or len(self._idle) != len(self._entries):
            raise IntegrityError("encoder cache: features are leased or encoding while nothing runs")

    def _start(self, identity: bytes, encode: Encode) -> _Flight:
        async def fly() -> Features:
            try:
                features = None if self._shared is None else await self._shared.get(identity)
                flight.encodes = features is None
                if features is None:
                    features = await encode()
            finally:
                self._land(identity, flight)
            if self._shared is not None and flight.encodes:
                self._shared.put_soon(identity, features)
            features.flags.writeable = False
            self._keep(identity, features)
            return features

        flight = self._flights[identity] = _Flight(asyncio.create_task(fly(), name="encode"))
        # When all waiters are gone nobody asks for the task's exception; asking here keeps asyncio from logging it.
        flight.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return flight

    def _land(self, identity: bytes, flight: _Flight) -> None:
        if self._flights.get(identity) is flight:
            del self._flights[identity]

    def _keep(self, identity: bytes, features: Features) -> None:
        size_bytes = features.nbytes
        idle_bytes = sum(self._entries[key].features.nbytes for key in self._idle)
        if identity in self._entries or self._used_bytes - idle_bytes + size_bytes > self._budget_bytes:
            return
        while self._used_bytes + size_bytes > self._budget_bytes:
            evicted, _ = self._idle.popitem(last=False)
            self._used_bytes -= self._entries.pop(evicted).features.nbytes
        self._entries[identity] = _Entry(features)
        self._idle[identity] = None
        self._used_bytes += size_bytes

    def _lease(self, identity: bytes, *, encoded: bool) -> Lease:
        entry = self._entries[identity]
        if entry.references == 0:
            del self._idle[identity]
        entry.references += 1

        def release() -> None:
            entry.references -= 1
            if entry.references == 0:
                self._idle[identity] = None

        return Lease(entry.features, encoded, release)
