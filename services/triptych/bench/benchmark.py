"""A whole benchmark: every scenario, every server, rounds that alternate between servers."""

import os
import platform
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np

from triptych import __version__
from triptych.bench.driver import run_round
from triptych.bench.goodput import RateSearch, Slo, meets
from triptych.bench.pacing import Concurrency, Pacing, Rate
from triptych.bench.report import (
    Goodput,
    Probe,
    Report,
    Result,
    RoundReport,
    figures_of,
    ratios,
    report_round,
    summarise,
)
from triptych.bench.scenarios import Shape, make_arrivals
from triptych.bench.targets.target import Target
from triptych.bench.workload import Arrival

PROBE_GRACE_S = 30.0
"""How long a goodput probe may run past its arrivals before what is unfinished counts as failed."""

MIN_PROBE_REQUESTS = 16

Progress = Callable[[str], None]
"""Called with what is about to be measured."""


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """How to look for goodput.

    Attributes:
        slo: The limits.
        start_rate: First rate tried, in requests per second.
        max_rate: Highest rate tried.
        probe_s: Length of a probe's arrivals.
        max_probes: Most rates tried.
    """

    slo: Slo
    start_rate: float = 1.0
    max_rate: float = 1000.0
    probe_s: float = 20.0
    max_probes: int = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        scenarios: Names from SCENARIOS.
        shape: Sizes of prompts, pictures and answers.
        pacing: Arrivals of the rounds.
        requests: Conversations per round.
        repeats: Rounds per server, at least one.
        warmup: Conversations per server before the first round, not counted.
        seed: Equal seeds send equal requests.
        own_content: Gives each server requests of its own, equal in size, where they share caches (the gateway and the
            router of one stack, say).
        goodput: None: not searched.
    """

    scenarios: tuple[str, ...]
    shape: Shape = field(default_factory=Shape)
    pacing: Pacing = field(default_factory=lambda: Concurrency(1))
    requests: int = 32
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    own_content: bool = False
    goodput: GoodputPlan | None = None


async def run_benchmark(plan: Plan, targets: Sequence[Target], progress: Progress = lambda what: None) -> Report:
    """Measures all scenarios against all servers and returns the report.

    In each round all servers get the same requests, one server after the other, and another one begins each time.
    No two rounds share a prompt or a picture, so no cache helps but within a round. Raises Unavailable when a server
    does not answer; requests that fail later are counted in the report.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    for target in targets:
        await target.prepare()
    results: list[Result] = []
    for scenario in plan.scenarios:
        if plan.warmup:
            await _warm_up(plan, scenario, targets, progress)
        rounds = await _measure(plan, scenario, targets, progress)
        goodputs = await search_goodput(plan, plan.goodput, scenario, targets, progress) if plan.goodput else {}
        first = rounds[targets[0].name]
        results += [
            _result(plan, scenario, target, rounds[target.name], first, goodputs.get(target.name)) for target in targets
        ]
    return Report(
        version=__version__,
        started_at=started_at,
        machine={"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count() or 0},
        settings={
            **asdict(plan),
            "scenarios": list(plan.scenarios),
            "pacing": str(plan.pacing),
            "servers": [target.name for target in targets],
        },
        results=results,
    )


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a seed that differs for different names, the same on every machine."""
    words = [zlib.crc32(str(name).encode()) for name in names]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0])


def _arrivals(plan: Plan, scenario: str, count: int, target: Target, *names: str | int) -> list[Arrival]:
    own = (target.name,) if plan.own_content else ()
    return make_arrivals(scenario, plan.shape, count, derive_seed(plan.seed, scenario, *names, *own))


async def _warm_up(plan: Plan, scenario: str, targets: Sequence[Target], progress: Progress) -> None:
    for target in targets:
        arrivals = _arrivals(plan, scenario, plan.warmup, target, "warm-up")
        progress(f"{scenario}: {target.name}, warm-up")
        await run_round(target, arrivals, Concurrency(plan.warmup), plan.shape.output_tokens)


async def _measure(
    plan: Plan, scenario: str, targets: Sequence[Target], progress: Progress
) -> dict[str, list[RoundReport]]:
    rounds: dict[str, list[RoundReport]] = {target.name: [] for target in targets}
    for number in range(plan.repeats):
        seed = derive_seed(plan.seed, scenario, number)
        turn = number % len(targets)
        for target in [*targets[turn:], *targets[:turn]]:
            progress(f"{scenario}: {target.name}, round {number + 1} of {plan.repeats}, {plan.pacing}")
            arrivals = _arrivals(plan, scenario, plan.requests, target, number)
            outcome = await run_round(target, arrivals, plan.pacing, plan.shape.output_tokens, seed)
            rounds[target.name].append(report_round(outcome, seed))
    return rounds


async def search_goodput(
    plan: Plan, wanted: GoodputPlan, scenario: str, targets: Sequence[Target], progress: Progress
) -> dict[str, Goodput]:
    """Searches for all servers at once, a probe each in turn, so that a drifting machine hurts all alike.

    Returns what was found by the servers' names.
    """
    searches = {
        target.name: RateSearch(wanted.start_rate, max_probes=wanted.max_probes, max_rate=wanted.max_rate)
        for target in targets
    }
    probes: dict[str, list[Probe]] = {target.name: [] for target in targets}
    for number in range(wanted.max_probes):
        for target in targets:
            rate = searches[target.name].propose()
            if rate is None:
                continue
            progress(f"{scenario}: {target.name}, goodput probe {number + 1}, {rate:.3g}/s")
            # Other content each time, or caches would help; the same pattern of arrivals, or chance would decide.
            count = max(MIN_PROBE_REQUESTS, round(rate * wanted.probe_s))
            arrivals = _arrivals(plan, scenario, count, target, "probe", number)
            deadline_s = count / rate * 1.5 + PROBE_GRACE_S
            outcome = await run_round(
                target, arrivals, Rate(rate), plan.shape.output_tokens, plan.seed, deadline_s=deadline_s
            )
            met = meets(wanted.slo, outcome.records)
            searches[target.name].observe(rate, met)
            figures = figures_of(outcome.records, outcome.duration_s)
            probes[target.name].append(Probe(rate=rate, met=met, figures=figures))
    return {
        name: Goodput(
            ttft_p99_limit_s=wanted.slo.ttft_s,
            tpot_p99_limit_s=wanted.slo.tpot_s,
            requests_per_s=search.best,
            probes=probes[name],
        )
        for name, search in searches.items()
    }


def _result(
    plan: Plan,
    scenario: str,
    target: Target,
    rounds: list[RoundReport],
    first: list[RoundReport],
    goodput: Goodput | None,
) -> Result:
    labels = sorted({label for one in rounds for label in one.by_label})
    figures = [one.figures for one in rounds]
    return Result(
        scenario=scenario,
        server=target.name,
        model=target.model,
        pacing=str(plan.pacing),
        summary=summarise(figures),
        by_label={
            label: summarise([one.by_label[label] for one in rounds if label in one.by_label]) for label in labels
        },
        ratio_to_first={} if rounds is first else ratios(figures, [one.figures for one in first]),
        goodput=goodput,
        rounds=rounds,
    )
