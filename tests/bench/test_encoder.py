"""`triptych bench encoder` on the bundled model."""

import pytest

from triptych.bench.encoder import measure_encoder
from triptych.stack import StackSettings


@pytest.mark.integration
async def test_the_encoder_is_timed_in_a_triton_of_its_own() -> None:
    figures = await measure_encoder(StackSettings.from_environment(), 3, lambda name, line: None)
    assert (figures.image_side, figures.provider) == (112, "cpu")
    assert 0 < figures.seconds.low <= figures.seconds.median <= figures.seconds.high
    assert figures.images_per_s == pytest.approx(1 / figures.seconds.median)
