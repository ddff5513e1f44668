"""Whole benchmarks: fair rounds, goodput with a known limit, one document at the end."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.servers import OpenAiServer, serving
from tests.bench.test_driver import Simulated
from triptych.bench.benchmark import GoodputPlan, Plan, run_benchmark
from triptych.bench.goodput import Slo
from triptych.bench.pacing import Concurrency
from triptych.bench.report import Report
from triptych.bench.scenarios import Shape
from triptych.bench.targets.http import HttpTarget
from triptych.bench.targets.target import Piece, Usage
from triptych.bench.workload import Ask

SHAPE = Shape(prompt_tokens=4, output_tokens=2, picture_side=16)
PLAN = Plan(("text",), SHAPE, Concurrency(2), requests=6, repeats=3, warmup=2)


class OneLane(Simulated):
    """Serves one request at a time, `time_s` each: it holds 1 / time_s requests a second and no more."""

    def __init__(self, time_s: float) -> None:
        super().__init__(time_s)
        self._lane = asyncio.Semaphore(1)

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Usage, None]:
        async with self._lane:
            await asyncio.sleep(self._time_s)
        yield Piece("one ")
        yield Piece("two")
        yield Usage(5, 2)


async def test_all_servers_get_the_same_requests_and_take_turns_to_begin() -> None:
    order: list[str] = []
    first, second = Simulated(name="first"), Simulated(name="second")
    report = await run_benchmark(PLAN, [first, second], lambda what: order.append(what.split(": ")[1].split(",")[0]))
    assert first.asks == second.asks
    assert order == ["first", "second", *["first", "second", "second", "first", "first", "second"]]
    one, two = report.results
    assert [round_.seed for round_ in one.rounds] == [round_.seed for round_ in two.rounds]
    assert one.ratio_to_first == {} and two.ratio_to_first["ttft_p50_s"].median == pytest.approx(1, rel=0.5)


async def test_servers_that_share_caches_can_be_given_requests_of_their_own() -> None:
    first, second = Simulated(name="first"), Simulated(name="second")
    plan = replace(PLAN, own_content=True, shape=replace(SHAPE, prompt_tokens=16))
    await run_benchmark(plan, [first, second])
    assert len(first.asks) == len(second.asks)
    assert not set(first.asks) & set(second.asks)


async def test_no_two_rounds_share_a_request() -> None:
    server = Simulated()
    await run_benchmark(PLAN, [server])
    assert len(server.asks) == 2 + 3 * 6
    assert len({ask.messages[0].text for ask in server.asks}) > 15  # Four words may repeat by chance.


async def test_labels_have_statistics_of_their_own() -> None:
    report = await run_benchmark(replace(PLAN, scenarios=("mixed",), requests=12), [Simulated()])
    (result,) = report.results
    assert set(result.by_label) == {"image", "text"}
    (text, image) = (result.rounds[0].by_label[label].requests for label in ("text", "image"))
    assert (text, image) == (8, 4)


@pytest.mark.slow
async def test_goodput_is_found_near_the_limit_of_a_simulated_server() -> None:
    limit = 50.0
    goodput = GoodputPlan(Slo(ttft_s=0.25, tpot_s=0.05), start_rate=10, probe_s=1.5, max_probes=7)
    plan = replace(PLAN, repeats=1, goodput=goodput)
    (result,) = (await run_benchmark(plan, [OneLane(1 / limit)])).results
    assert result.goodput is not None
    # A queue with random arrivals misses a limit on waiting before it is full, and short probes forgive a little.
    assert 0.4 * limit <= result.goodput.requests_per_s <= 1.3 * limit
    assert len(result.goodput.probes) <= 7
    best = max(probe.rate for probe in result.goodput.probes if probe.met)
    assert best == result.goodput.requests_per_s


async def test_the_report_survives_a_round_trip_through_json_and_its_client_figures_are_there() -> None:
    async with serving(OpenAiServer(delay_s=0.001)) as server:
        target = HttpTarget(server.url, name="toy")
        report = await run_benchmark(replace(PLAN, scenarios=("one-image", "repeated-image")), [target])
        await target.close()
    again = Report.model_validate_json(report.model_dump_json())
    assert again == report
    assert [result.scenario for result in report.results] == ["one-image", "repeated-image"]
    round_ = report.results[0].rounds[0]
    assert round_.figures.counted == 1 and round_.figures.output_tokens == 18 and round_.figures.prompt_tokens == 42
    assert 0 < round_.client.cpu_share < 4
    assert round_.client.send_lag_s is not None


def test_every_field_of_the_report_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
    schema = Report.model_json_schema()
    names = {name for part in [schema, *schema["$defs"].values()] for name in part["properties"]}
    assert not {name for name in names if f"`{name}`" not in documented}
    json.dumps(schema)
