"""The arrival process: Poisson, repeatable, scalable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.bench.pacing import poisson_times

RATES = st.floats(min_value=0.01, max_value=1000)
SEEDS = st.integers(min_value=0, max_value=2**32)


@given(RATES, st.integers(min_value=0, max_value=200), SEEDS)
def test_times_increase_and_are_as_many_as_asked(per_s: float, count: int, seed: int) -> None:
    times = poisson_times(per_s, count, seed)
    assert len(times) == count
    assert all(earlier < later for earlier, later in zip([0.0, *times], times, strict=False))


@given(RATES, SEEDS)
def test_equal_seeds_give_equal_times_and_the_rate_only_scales_them(per_s: float, seed: int) -> None:
    times = poisson_times(per_s, 20, seed)
    assert times == poisson_times(per_s, 20, seed)
    assert poisson_times(2 * per_s, 20, seed) == pytest.approx([time / 2 for time in times])


def test_gaps_have_the_mean_and_the_deviation_of_a_poisson_process() -> None:
    gaps = np.diff([0.0, *poisson_times(5.0, 20_000, 1)])
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize("per_s", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(per_s: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        poisson_times(per_s, 1, 0)
