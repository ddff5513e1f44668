"""Memory stays flat however many images pass; `tests/worker/kv/soak.py` does the same for ten thousand."""

from pathlib import Path

import pytest

from tests.worker.kv.soak import soak


@pytest.mark.slow
def test_images_that_nobody_asks_for_again_leave_nothing_behind(tiny_dir: Path) -> None:
    found = soak(tiny_dir, 800, readings=4)
    assert found["visual_hit_rate"] > 0.1
    assert all(held["host"] <= 16 << 20 and held["disk"] <= 32 << 20 for held in found["tier_bytes"])
    assert found["python_blocks_growth"] < 1.05
    assert found["resident_growth"] < 1.1
