"""Generations on a draft encoder's features: computed at once, told once the features have been found good enough.

The engine knows nothing of this. A draft that is not kept is cancelled, and the request is submitted anew with its
final features: what stands before the first image that differs is then found in the prefix cache, the rest is prefilled
again. Draft features have identities of their own, so their KV is never taken for that of final ones.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from triptych.errors import InvalidRequest, StageTimeout
from triptych.worker.engine.events import Completed, Event, Queued, Retracted, Text
from triptych.worker.engine.request import GenerationRequest
from triptych.worker.engine.thread import EngineThread

MAX_ID = 128


class DraftedGeneration:
    """One generation on draft features, seen from the event loop.

    Attributes:
        request: As submitted, with the draft's features.
        drafted_tokens: Output tokens told by the engine before the verdict.
        settled_ns: When the verdict came, nanoseconds since the epoch; None before.
        kept: Whether the draft was kept; False before the verdict.
    """

    def __init__(self, engine: EngineThread, request: GenerationRequest, early_text: bool, timeout_s: float) -> None:
        self.request = request
        self.drafted_tokens = 0
        self.settled_ns: int | None = None
        self.kept = False
        self._engine = engine
        self._early_text = early_text
        self._timeout_s = timeout_s
        self._verdict: asyncio.Future[GenerationRequest | None] = asyncio.get_running_loop().create_future()
        self._generation = engine.submit(request)

    def settle(self, final: GenerationRequest | None) -> None:
        """Takes the verdict: None keeps the draft, else `final` is the same request with final features."""
        self.settled_ns = time.time_ns()
        self.kept = final is None
        self._verdict.set_result(final)

    def cancel(self) -> None:
        """Ends the request before the next step; does nothing if it has ended."""
        self._generation.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Yields the request's events up to Completed: Queued at once, the rest after the verdict.

        With early text, Text comes at once, and Retracted where it was wrong. Raises what the engine tells, and
        StageTimeout (DRAFT_TIMEOUT) when no verdict comes.
        """
        held: list[Event] = []
        async with aclosing(self._until_verdict()) as drafted:
            async for event in drafted:
                self.drafted_tokens += event.token_count if isinstance(event, Text) else 0
                if isinstance(event, Queued) or (self._early_text and isinstance(event, Text)):
                    yield event
                else:
                    held.append(event)
        final = self._verdict.result()
        if final is not None:
            self._generation.cancel()
            if self._early_text and self.drafted_tokens:
                yield Retracted()
            held = []
            self._generation = self._engine.submit(final)
        for event in held:
            yield event
        if not (held and isinstance(held[-1], Completed)):
            async for event in self._generation.events():
                if not isinstance(event, Queued):
                    yield event

    async def _until_verdict(self) -> AsyncGenerator[Event, None]:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self._timeout_s
        completed = False
        while not self._verdict.done():
            reading = None if completed else asyncio.ensure_future(self._generation.next_event())
            try:
                waited_for: set[asyncio.Future[Any]] = {self._verdict} if reading is None else {self._verdict, reading}
                await asyncio.wait(waited_for, timeout=deadline_s - clock(), return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    event = reading.result()
                    completed = isinstance(event, Completed)
                    yield event
                elif not self._verdict.done():
                    self.cancel()
                    raise StageTimeout(
                        f"no verdict on the draft features within draft_timeout_s={self._timeout_s:g}",
                        reason="DRAFT_TIMEOUT",
                    )
            finally:
                if reading is not None:
                    reading.cancel()


class Drafts:
    """The generations that wait for a verdict, by the name under which it will come. For one event loop."""

    def __init__(self, engine: EngineThread, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._waiting: dict[str, DraftedGeneration] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, name: str, request: GenerationRequest, early_text: bool) -> DraftedGeneration:
        """Submits a request and waits for its verdict. Raises InvalidRequest, and what the engine's `submit` raises."""
        if not 1 <= len(name) <= MAX_ID or name in self._waiting:
            raise InvalidRequest(f"draft.id must have 1 to {MAX_ID} characters and be no other generation's")
        generation = DraftedGeneration(self._engine, request, early_text, self._timeout_s)
        self._waiting[name] = generation
        return generation

    def find(self, name: str) -> DraftedGeneration:
        """Returns a generation that waits. Raises InvalidRequest (DRAFT_UNKNOWN)."""
        if name not in self._waiting:
            raise InvalidRequest("no generation waits for a verdict of this name", reason="DRAFT_UNKNOWN")
        return self._waiting[name]

    def settle(self, name: str, final: GenerationRequest | None) -> None:
        """Gives a generation its verdict, see `DraftedGeneration.settle`. Raises InvalidRequest (DRAFT_UNKNOWN)."""
        self.find(name).settle(final)
        del self._waiting[name]

    def end(self, generation: DraftedGeneration) -> None:
        """Forgets a generation that has ended; does nothing if it got its verdict."""
        for name in [name for name, waiting in self._waiting.items() if waiting is generation]:
            del self._waiting[name]
