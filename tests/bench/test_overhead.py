"""The client is not the bottleneck: events per second against a server that only sends."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.bench.flood import EVENTS
from triptych.bench.driver import run_round
from triptych.bench.pacing import Concurrency
from triptych.bench.scenarios import Shape, make_arrivals
from triptych.bench.targets.http import HttpTarget

STREAMS = 32
REQUESTS = 64
LEAST_EVENTS_PER_S = 4_000
"""Far below what a quiet core does (docs/benchmarking.md), and far above what one machine's tokens need."""


@pytest.fixture
def flood() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.flood"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    process.stdin.close()
    process.wait(timeout=10)


async def test_the_client_reads_thousands_of_events_a_second_and_loses_none(flood: str) -> None:
    target = HttpTarget(flood)
    await target.prepare()
    arrivals = make_arrivals("text", Shape(prompt_tokens=4, output_tokens=EVENTS), REQUESTS, 0)
    outcome = await run_round(target, arrivals, Concurrency(STREAMS), EVENTS)
    await target.close()
    assert all(not record.error and len(record.pieces_s) == EVENTS for record in outcome.records)
    events_per_s = REQUESTS * EVENTS / outcome.duration_s
    cpu_us = outcome.cpu_s / (REQUESTS * EVENTS) * 1e6
    print(f"{events_per_s:.0f} events/s, {cpu_us:.1f} us of the client's processor each")
    assert events_per_s > LEAST_EVENTS_PER_S
