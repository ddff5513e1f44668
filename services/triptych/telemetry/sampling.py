"""A bound on what tracing costs: at most so many new traces a second; where fewer begin, every one is recorded."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

TRACES_PER_S = "TRIPTYCH_TRACES_PER_S"
"""The variable that sets the bound; unset: the SDK's own variables decide."""


class RateLimited(Sampler):
    """Records a new trace while there are tokens: `per_s` a second come back, up to a second's worth. Thread-safe."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError unless per_s >= 1."""
        if not per_s >= 1:
            raise ValueError(f"at least one trace a second must be allowed, got {per_s}")
        self._per_s = per_s
        self._clock = clock
        self._tokens = per_s
        self._seen_s = clock()
        self._lock = threading.Lock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        if not self._take():
            return SamplingResult(Decision.DROP)
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        """See Sampler."""
        return f"RateLimited{{{self._per_s:g}/s}}"

    def _take(self) -> bool:
        with self._lock:
            now_s = self._clock()
            self._tokens = min(self._per_s, self._tokens + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


def sampler_from(environment: Mapping[str, str]) -> Sampler | None:
    """Returns the sampler that TRIPTYCH_TRACES_PER_S asks for; None, the SDK's own, when it is unset.

    Only the service where a trace begins decides; the others follow. Raises ValueError when it is no number from 1 on.
    """
    per_s = environment.get(TRACES_PER_S)
    return ParentBased(root=RateLimited(float(per_s))) if per_s else None
