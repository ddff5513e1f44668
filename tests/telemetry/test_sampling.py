"""What is kept under load is bounded, and a quiet service loses nothing."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, ParentBased

from triptych.telemetry.sampling import TRACES_PER_S, RateLimited, sampler_from


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def kept(sampler: RateLimited, clock: Clock, gap_s: float, count: int) -> int:
    """Returns how many of `count` traces, one every gap_s, are recorded."""
    found = 0
    for _ in range(count):
        clock.now_s += gap_s
        found += sampler.should_sample(None, 1, "x").decision is Decision.RECORD_AND_SAMPLE
    return found


def test_below_the_bound_every_trace_is_recorded() -> None:
    clock = Clock()
    assert kept(RateLimited(10, clock), clock, 0.11, 200) == 200


def test_above_the_bound_no_more_than_it_and_the_first_second_are_recorded() -> None:
    clock = Clock()
    assert kept(RateLimited(10, clock), clock, 0.001, 5000) == pytest.approx(10 * 5 + 10, abs=1)


def test_spans_below_a_trace_follow_its_beginning() -> None:
    clock = Clock()
    tracer = TracerProvider(sampler=ParentBased(root=RateLimited(1, clock))).get_tracer("test")
    for expected in (True, False):
        with tracer.start_as_current_span("root") as root, tracer.start_as_current_span("child") as child:
            assert root.is_recording() is child.is_recording() is expected


def test_without_the_variable_the_sdk_decides() -> None:
    assert sampler_from({}) is None
    sampler = sampler_from({TRACES_PER_S: "5"})
    assert sampler is not None and "RateLimited{5/s}" in sampler.get_description()


@pytest.mark.parametrize("value", ["0", "nan"])
def test_a_bound_below_one_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="at least one"):
        sampler_from({TRACES_PER_S: value})
