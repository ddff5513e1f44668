"""The goodput search finds a known limit within its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.bench.goodput import RateSearch, Slo, meets
from triptych.bench.recorder import Record


def search_for(limit: float, search: RateSearch) -> list[float]:
    """Lets the search find what a server that holds up to `limit` can take; returns the rates it tried."""
    tried = []
    while (rate := search.propose()) is not None:
        tried.append(rate)
        search.observe(rate, rate <= limit)
    return tried


@given(st.floats(min_value=0.05, max_value=500), st.floats(min_value=0.1, max_value=100))
def test_a_known_limit_is_found_within_the_precision_and_never_exceeded(limit: float, start: float) -> None:
    search = RateSearch(start, precision=0.05, max_probes=40)
    tried = search_for(limit, search)
    assert search.best <= limit <= search.best * 1.05
    assert len(tried) < 40


@given(st.floats(min_value=0.001, max_value=1e6), st.integers(min_value=1, max_value=12))
def test_the_number_of_probes_is_bounded(limit: float, max_probes: int) -> None:
    search = RateSearch(1.0, max_probes=max_probes)
    assert len(search_for(limit, search)) <= max_probes
    assert search.best <= limit


def test_a_server_that_holds_no_rate_has_no_goodput() -> None:
    search = RateSearch(8.0, max_probes=5)
    assert search_for(0.0, search) == [8.0, 4.0, 2.0, 1.0, 0.5]
    assert search.best == 0


def test_a_server_that_holds_everything_is_not_asked_beyond_the_maximum() -> None:
    search = RateSearch(1.0, max_rate=5.0)
    assert search_for(1e9, search) == [1.0, 2.0, 4.0, 5.0]
    assert search.best == 5.0


@pytest.mark.parametrize(
    "arguments", [{"start": 0.0}, {"start": 2.0, "max_rate": 1.0}, {"start": 1.0, "precision": 0.0}]
)
def test_an_impossible_search_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="do not hold"):
        RateSearch(**arguments)  # type: ignore[arg-type]


def record(ttft_s: float, tpot_s: float, error: str = "") -> Record:
    return Record("text", 0, 0.0, 0.0, [ttft_s, ttft_s + tpot_s], ttft_s + tpot_s, 2, error=error)


def test_the_limits_are_on_the_99th_percentiles_of_both_times() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    fine = [record(0.9, 0.09)] * 300
    assert meets(slo, fine)
    assert meets(slo, [*fine, record(5.0, 0.09)])
    assert not meets(slo, [*fine, *[record(5.0, 0.09)] * 9])
    assert not meets(slo, [*fine, *[record(0.5, 0.5)] * 9])


def test_one_failed_request_or_one_without_a_token_misses_the_limits() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    assert not meets(slo, [record(0.1, 0.1), record(0.1, 0.1, error="HTTP 429")])
    assert not meets(slo, [record(0.1, 0.1), Record("text", 0, 0.0, 0.0)])
    assert not meets(slo, [])
