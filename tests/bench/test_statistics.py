"""Statistics against exact values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.bench.statistics import distribution, percentile, spread

VALUES = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(min_value=0, max_value=1))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    expected = np.percentile(values, share * 100)
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_distribution_has_exact_figures() -> None:
    found = distribution([float(value) for value in range(100, -1, -1)])
    assert found is not None
    assert found.model_dump() == {
        "count": 101, "mean": 50.0, "min": 0.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0,
    }  # fmt: skip


def test_a_percentile_between_two_values_is_interpolated() -> None:
    assert percentile([1.0, 2.0], 0.25) == 1.25


def test_one_value_is_all_its_percentiles() -> None:
    found = distribution([3.0])
    assert found is not None and {found.p50, found.p99, found.min, found.max, found.mean} == {3.0}


def test_no_values_have_no_distribution_and_no_spread() -> None:
    assert distribution([]) is None
    assert spread([]) is None


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_percentile_that_does_not_exist_is_an_error(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, share)


def test_a_spread_is_median_smallest_and_largest_of_the_rounds() -> None:
    found = spread([5.0, 1.0, 2.0])
    assert found is not None and (found.median, found.low, found.high) == (2.0, 1.0, 5.0)
