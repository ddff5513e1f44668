"""Many at once, and many after each other. Ratios and counts only: absolute times depend on the machine."""

import pytest

from tests.gateway.load import measure_streams, soak

pytestmark = pytest.mark.slow


async def test_256_streams_lose_no_event_and_keep_the_pace() -> None:
    pace_s = 0.25
    report = await measure_streams(streams=256, tokens=16, pace_s=pace_s)
    assert report.lost_events == 0
    assert report.tokens == 256 * 16
    # No token waits for its successor.
    assert report.added_p50_s < pace_s


async def test_memory_is_flat_over_2000_requests() -> None:
    report = await soak(requests=2_000)
    assert report.failed == 0
    assert report.growth < 1.1, report.rss
