"""A step between its start and its end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.worker.engine.runner import Outcome
from triptych.worker.engine.scheduler import StepPlan
from triptych.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Computing:
    """A step that has begun.

    Attributes:
        plan: What it computes.
        start_ns: When it began, nanoseconds since the epoch.
        outcomes: Waits for what it gave.
        sequences: Whom it computes.
        cancelled: Which of them end with it, whatever it gives.
    """

    plan: StepPlan
    start_ns: int
    outcomes: Callable[[], list[Outcome]]
    sequences: frozenset[Sequence]
    cancelled: set[Sequence] = field(default_factory=set)
