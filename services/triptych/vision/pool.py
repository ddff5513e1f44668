"""Several encoders as one: who is healthy, how busy each is, and who would be done first."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.errors import IntegrityError
from triptych.vision.cost import CostModel
from triptych.vision.encoder import Endpoint
from triptych.vision.encoder_spec import EncoderSpec, newest
from triptych.vision.scheduler import Flight

log = logging.getLogger(__name__)

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
"""How long an encoder is left out after its first failure, and at most; each failure in a row doubles it."""

_UNKNOWN_S = 0.05
"""Seconds that a batch is taken to need in an encoder that has not finished one lately."""

_FORGET_S = 10.0
"""How long an idle encoder's times are remembered."""


@dataclass(slots=True, eq=False)
class Flying:
    """A batch under way.

    Attributes:
        pixels: Of all its images.
        images: How many.
        started_s: When it left.
    """

    pixels: int
    images: int
    started_s: float


@dataclass(slots=True, eq=False)
class Member:
    """One encoder of the pool.

    Attributes:
        endpoint: The encoder.
        cost: What its batches take.
        flying: Its batches under way, oldest first.
        failures: How many of its batches failed in a row.
        rests_until_s: Until when it gets nothing, because it failed.
        lost: Nobody answers there, by its last batch; until it is seen again.
        ended_s: When its last batch was done.
    """

    endpoint: Endpoint
    cost: CostModel = field(default_factory=CostModel)
    flying: list[Flying] = field(default_factory=list)
    failures: int = 0
    rests_until_s: float = 0.0
    lost: bool = False
    ended_s: float = float("-inf")

    @property
    def flight(self) -> Flight:
        """What is under way in it."""
        return Flight(len(self.flying), sum(flying.pixels for flying in self.flying))

    def usable(self, now_s: float) -> bool:
        """Whether it gets work now."""
        return self.endpoint.ready and now_s >= self.rests_until_s

    def lately(self, pixels: int, now_s: float) -> float | None:
        """Returns what a batch of so many pixels takes, by its latest batches.

        What it took long ago counts for nothing: an encoder that was slow is tried again.
        """
        return self.cost.predict(pixels) if self.flying or now_s - self.ended_s < _FORGET_S else None


class EncoderPool:
    """The encoders behind one router. Used from one event loop only."""

    def __init__(self, endpoints: Sequence[Endpoint], clock: Callable[[], float] = time.monotonic) -> None:
        self.members = tuple(Member(endpoint) for endpoint in endpoints)
        self._clock = clock
        self._spec: EncoderSpec | None = None

    @property
    def spec(self) -> EncoderSpec | None:
        """The newest version that all ready encoders serve, else the newest of any; kept while all are away."""
        ready = [member.endpoint.versions for member in self.members if member.endpoint.ready]
        if ready:
            common = set.intersection(*(set(versions) for versions in ready))
            every = {name: spec for versions in ready for name, spec in versions.items()}
            self._spec = newest({name: every[name] for name in common} or every)
        return self._spec

    @property
    def ready(self) -> bool:
        """Whether any encoder is ready."""
        return any(member.endpoint.ready for member in self.members)

    async def refresh(self, timeout_s: float) -> bool:
        """Looks at all encoders at once and returns `ready`."""
        seen = await asyncio.gather(*(member.endpoint.refresh(timeout_s) for member in self.members))
        for member, answers in zip(self.members, seen, strict=True):
            member.lost = member.lost and not answers
        return self.ready

    def serving(self, version: str) -> list[Member]:
        """Returns the encoders that serve a version and get work now.

        If none is left, those that rest because they were slow; then those where nobody answers.
        """
        now_s = self._clock()
        ready = [m for m in self.members if m.endpoint.ready and version in m.endpoint.versions]
        usable = [member for member in ready if member.usable(now_s)]
        return usable or [member for member in ready if not member.lost] or ready

    def seconds_for(self, member: Member, pixels: int) -> float:
        """Returns how long a batch of so many pixels is expected to take in an encoder.

        One that has done nothing lately is taken to be as fast as the fastest.
        """
        now_s = self._clock()
        own = member.lately(pixels, now_s)
        if own is not None:
            return own
        others = (other.lately(pixels, now_s) for other in self.members)
        return min((seconds for seconds in others if seconds is not None), default=_UNKNOWN_S)

    def wait_s(self, member: Member) -> float:
        """Returns the seconds until what is in an encoder is expected to be done; batches run one after the other.

        Work that is overdue is expected to take as long again as it is late: the longer an encoder hangs, the less
        it is chosen. Requests of others that wait in it count as small ones.
        """
        left_s = 0.0
        if member.flying:
            spent_s = self._clock() - max(member.flying[0].started_s, member.ended_s)
            left_s = abs(sum(self.seconds_for(member, flying.pixels) for flying in member.flying) - spent_s)
        others = max(0, member.endpoint.pending - len(member.flying))
        return left_s + others * self.seconds_for(member, 0)

    def choose(self, version: str, pixels: int) -> Member | None:
        """Returns the encoder that would be done first with a batch of so many pixels, None where nobody serves it."""
        return min(
            self.serving(version),
            key=lambda member: self.wait_s(member) + self.seconds_for(member, pixels),
            default=None,
        )

    def begin(self, member: Member, pixels: int, images: int) -> Flying:
        """Books a batch that leaves now."""
        flying = Flying(pixels, images, self._clock())
        member.flying.append(flying)
        return flying

    def end(self, member: Member, flying: Flying, *, healthy: bool | None, lost: bool = False) -> None:
        """Takes a batch off the books.

        `healthy`: whether the encoder did its part; None: there is no telling. `lost`: nobody answered.
        """
        member.flying.remove(flying)
        member.lost = lost or (member.lost and not healthy)
        now_s = self._clock()
        if healthy:
            # While the batch before it ran, this one only waited.
            member.cost.note(flying.pixels, now_s - max(flying.started_s, member.ended_s))
            member.failures, member.rests_until_s = 0, 0.0
            member.ended_s = now_s
        elif healthy is False and now_s >= member.rests_until_s:  # Batches that fall together are one failure.
            member.failures += 1
            rest_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2 ** (member.failures - 1))
            member.rests_until_s = now_s + rest_s
            if len(self.members) > 1:
                log.warning("encoder at %s is left out for %g s: it failed or hung", member.endpoint.address, rest_s)

    async def close(self) -> None:
        """Ends all connections."""
        await asyncio.gather(*(member.endpoint.close() for member in self.members))

    def check_idle(self) -> None:
        """Raises IntegrityError unless no encoder has anything under way."""
        if any(member.flying for member in self.members):
            raise IntegrityError("a batch is booked in an encoder although none is under way")
