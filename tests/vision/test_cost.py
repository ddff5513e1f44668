import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.vision.cost import CostModel


def test_nothing_is_predicted_before_the_first_batch() -> None:
    assert CostModel().predict(100) is None


def test_a_fixed_part_and_a_part_per_pixel_are_told_apart() -> None:
    model = CostModel()
    for pixels in (1000, 5000, 2000, 8000, 3000):
        model.note(pixels, 0.01 + pixels * 1e-5)
    assert model.predict(20_000) == pytest.approx(0.21)
    assert model.predict(0) == pytest.approx(0.01)


def test_batches_of_one_size_say_nothing_of_other_sizes() -> None:
    model = CostModel()
    for _ in range(5):
        model.note(1000, 0.05)
    assert model.predict(1000) == model.predict(100_000) == pytest.approx(0.05)


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-6, 1e3)), min_size=1), st.integers(0, 10**8))
def test_no_prediction_is_negative(batches: list[tuple[int, float]], pixels: int) -> None:
    model = CostModel()
    for size, seconds in batches:
        model.note(size, seconds)
    predicted = model.predict(pixels)
    assert predicted is not None and predicted >= -1e-9
