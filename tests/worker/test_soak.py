"""Memory stays flat while tokens are decoded; `tests/worker/soak.py` does the same for a million."""

from pathlib import Path

import pytest

from tests.worker.soak import soak


@pytest.mark.slow
def test_decoding_leaves_nothing_behind(tiny_dir: Path) -> None:
    found = soak(tiny_dir, 30_000, readings=6)
    assert found["python_blocks_growth"] < 1.02
    assert found["resident_growth"] < 1.05
