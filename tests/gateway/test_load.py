"""Many at once, and many after each other. Counts and ratios only: the command tells times."""

import pytest

from tests.gateway.load import measure_streams, soak

pytestmark = pytest.mark.slow


async def test_256_streams_at_once_lose_no_event() -> None:
    report = await measure_streams(streams=256, tokens=16, pace_s=0.25)
    assert report.lost_events == 0
    assert report.tokens == 256 * 16


async def test_memory_is_flat_over_2000_requests() -> None:
    report = await soak(requests=2_000)
    assert report.failed == 0
    assert report.growth < 1.1, report.rss
