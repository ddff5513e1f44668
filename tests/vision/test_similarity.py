import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.vision.similarity import similarity_of


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 20), st.floats(1e-3, 1e3))
def test_what_is_a_multiple_is_fully_alike_and_its_opposite_fully_unlike(
    seed: int, tokens: int, hidden: int, factor: float
) -> None:
    features = np.random.default_rng(seed).standard_normal((tokens, hidden)).astype(np.float32)
    assert similarity_of(features, np.float32(factor) * features) == pytest.approx((1, 1), abs=1e-5)
    assert similarity_of(features, -features) == pytest.approx((-1, -1), abs=1e-5)


def test_each_token_is_compared_with_its_own() -> None:
    draft = np.array([[1, 0], [0, 1], [1, 0], [0, 0]], np.float32)
    target = np.array([[2, 0], [1, 1], [0, 3], [1, 1]], np.float32)
    assert similarity_of(draft, target) == pytest.approx(((1 + 0.5**0.5 + 0 + 0) / 4, 0))


def test_large_numbers_do_not_overflow() -> None:
    large = np.full((2, 3), 3e38, np.float32)
    assert similarity_of(large, large) == pytest.approx((1, 1))
