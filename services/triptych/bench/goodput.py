"""Goodput under a service level: the highest request rate at which p99 TTFT and p99 TPOT stay inside their limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.bench.recorder import Record
from triptych.bench.statistics import percentile


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on the 99th percentiles, in seconds."""

    ttft_s: float
    tpot_s: float


def meets(slo: Slo, records: Sequence[Record]) -> bool:
    """Tells whether a round kept the limits: every request was answered, and both p99 are inside."""
    if not records or any(record.error for record in records):
        return False
    first = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    each = sorted(record.tpot_s for record in records if record.tpot_s is not None)
    if len(first) < len(records):
        return False
    return percentile(first, 0.99) <= slo.ttft_s and (not each or percentile(each, 0.99) <= slo.tpot_s)


class RateSearch:
    """A bounded search for the highest rate that is still good. Pure: it proposes, somebody else measures.

    From `start` it doubles while rates are good, or halves while they are bad, then bisects (geometrically) between the
    highest good and the lowest bad one, until they are within `precision` of each other or `max_probes` are spent.

    Attributes:
        best: The highest rate seen to be good; 0 when none was.
    """

    def __init__(self, start: float, *, precision: float = 0.1, max_probes: int = 10, max_rate: float = 1e4) -> None:
        """Raises ValueError unless start, precision and max_rate are positive and start <= max_rate."""
        if not (0 < start <= max_rate and precision > 0):
            raise ValueError(f"0 < start={start} <= max_rate={max_rate} and precision={precision} > 0 do not hold")
        self.best = 0.0
        self._lowest_bad: float | None = None
        self._next = start
        self._precision = precision
        self._probes_left = max_probes
        self._max_rate = max_rate

    def propose(self) -> float | None:
        """Returns the next rate to measure; None when the search is over."""
        if self._probes_left <= 0 or self.best >= self._max_rate:
            return None
        if self.best and self._lowest_bad and self._lowest_bad / self.best <= 1 + self._precision:
            return None
        return self._next

    def observe(self, rate: float, good: bool) -> None:
        """Takes what measuring `rate` gave."""
        self._probes_left -= 1
        if good:
            self.best = max(self.best, rate)
        else:
            self._lowest_bad = rate if self._lowest_bad is None else min(self._lowest_bad, rate)
        if self._lowest_bad is None:
            self._next = min(self.best * 2, self._max_rate)
        elif not self.best:
            self._next = self._lowest_bad / 2
        else:
            self._next = (self.best * self._lowest_bad) ** 0.5
