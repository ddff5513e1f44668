"""Runs a comparison: all engines started, all but one asleep, trials that go round them."""

import asyncio
import os
import platform
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych import __version__
from triptych.bench.benchmark import GoodputPlan, derive_seed, search_goodput
from triptych.bench.benchmark import Plan as ServePlan
from triptych.bench.driver import run_round
from triptych.bench.engine.limits import Bandwidth, ProductRate
from triptych.bench.pacing import Concurrency
from triptych.bench.peers.contestant import Contestant
from triptych.bench.peers.results import Entry, Results, Sample
from triptych.bench.peers.trials import Rates, Trial
from triptych.bench.report import Figures, report_round
from triptych.bench.scenarios import Shape, make_arrivals
from triptych.bench.targets.http import HttpTarget
from triptych.errors import Unavailable
from triptych.processes import LogSink
from triptych.stack import Stack
from triptych.worker.model.config import load_model_config

Progress = Callable[[str], None]
WARM_UP_TOKENS = 8
WARM_UP_TRIES = 20
WARM_UP_PAUSE_S = 0.5
DEADLINE_S = 240.0
"""When a round is cut off; what is unfinished then has failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; `seed` makes the requests."""

    model_dir: Path
    contestants: Sequence[Contestant]
    trials: Sequence[Trial]
    rounds: int
    seed: int = 0


class Runner:
    """A contestant that runs, asleep except inside `awake`."""

    def __init__(self, contestant: Contestant, stack: Stack) -> None:
        self.contestant = contestant
        self.target = HttpTarget(
            contestant.url, keep_connections=False, name=contestant.name, extra_body=contestant.body
        )
        self._stack = stack

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[HttpTarget]:
        """Lets the processes run; outside, they are stopped, so that an idle engine costs the others nothing."""
        self._stack.resume()
        try:
            yield self.target
        finally:
            self._stack.pause()


class Limits:
    """The machine's rates, measured between the trials, when all engines are asleep."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._config = load_model_config(model_dir).decoder
        self._bandwidth = Bandwidth(threads)
        self._products = ProductRate(self._config)

    def measure(self) -> Rates:
        """The best of three reads, and of the products."""
        return Rates(max(self._bandwidth.measure() for _ in range(3)), self._products.measure())

    def of(self, trial: Trial, dtype: str, rates: Rates) -> float | None:
        """A trial's limit."""
        return None if trial.limit is None else trial.limit(self._config, getattr(torch, dtype), rates)


def convert(contestant: Contestant, progress: Progress) -> None:
    """Runs the conversions that a contestant still needs. Raises Unavailable with the last lines of one that fails."""
    for command in contestant.conversions:
        progress(f"{contestant.name}: {' '.join(command.argv[:3])}")
        try:
            done = subprocess.run(command.argv, env=command.environment, capture_output=True, text=True, check=False)
        except OSError as error:
            raise not_installed(contestant, error) from None
        if done.returncode:
            lines = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
            raise Unavailable(f"{contestant.name}: {command.argv[0]} ended with {done.returncode}:\n{lines}")


def not_installed(contestant: Contestant, error: BaseException) -> Unavailable:
    """Returns the error for a program that is not there."""
    return Unavailable(f"{contestant.name}: {error}; try triptych bench peers --install {contestant.engine}")


async def compare(
    plan: Plan, sink: LogSink, progress: Progress, keep: Callable[[Results], None] = lambda results: None
) -> Results:
    """Starts everybody, measures, stops everybody. Raises Unavailable when somebody does not get ready.

    `keep` gets what has been found each time that a trial has gone round.
    """
    results = Results(
        version=__version__,
        machine={"system": platform.system(), "processor": processor(), "cores": len(os.sched_getaffinity(0))},
        model=plan.model_dir.name,
        entries=[
            Entry(name=one.name, engine=one.engine, title=one.title, access=one.access, dtype=one.dtype)
            for one in plan.contestants
        ],
        samples=[],
    )
    limits = Limits(plan.model_dir, len(os.sched_getaffinity(0)))
    async with AsyncExitStack() as exits:
        runners = []
        for contestant in plan.contestants:
            progress(f"starting {contestant.name}")
            runners.append(await exits.enter_async_context(_running(contestant, sink)))
        for number in range(plan.rounds):
            for trial in plan.trials:
                rates = await asyncio.to_thread(limits.measure)
                turn = number % len(runners)
                for runner in [*runners[turn:], *runners[:turn]]:
                    progress(f"round {number + 1} of {plan.rounds}, {trial.title}: {runner.contestant.name}")
                    limit = limits.of(trial, runner.contestant.dtype, rates)
                    results.samples.append(await _sample(plan, runner, trial, number, limit))
                keep(results)
    return results


@asynccontextmanager
async def _running(contestant: Contestant, sink: LogSink) -> AsyncIterator[Runner]:
    stack = Stack(contestant.services, sink)
    runner = Runner(contestant, stack)
    try:
        try:
            await stack.start()
        except* Unavailable as group:
            raise group.exceptions[0] from None
        except* OSError as group:
            raise not_installed(contestant, group.exceptions[0]) from None
        await runner.target.prepare()
        stack.pause()
        yield runner
    finally:
        await runner.target.close()
        stack.resume()
        await asyncio.shield(stack.stop())


async def _sample(plan: Plan, runner: Runner, trial: Trial, number: int, limit: float | None) -> Sample:
    seed = derive_seed(plan.seed, trial.name, number)
    arrivals = make_arrivals(trial.scenario, trial.shape, trial.requests, seed)
    short = Shape(trial.shape.prompt_tokens // 4 + 1, WARM_UP_TOKENS, trial.shape.picture_side)
    warm_up = make_arrivals(trial.scenario, short, 1, derive_seed(plan.seed, trial.name, number, "warm-up"))
    async with runner.awake() as target:
        for _ in range(WARM_UP_TRIES):  # After a sleep, a service may take a moment to believe that the others live.
            first = await run_round(target, warm_up, Concurrency(1), WARM_UP_TOKENS, deadline_s=DEADLINE_S)
            if not any(record.error for record in first.records):
                break
            await asyncio.sleep(WARM_UP_PAUSE_S)
        if trial.goodput is not None:
            rate, figures = await _goodput(target, trial, trial.goodput, seed)
            value: float | None = rate
        else:
            outcome = await run_round(
                target, arrivals, trial.pacing, trial.shape.output_tokens, seed, deadline_s=DEADLINE_S
            )
            report = report_round(outcome, seed)
            figures = report.figures
            value = None if figures.errors else trial.figure(report)
    entry = runner.contestant.name
    return Sample(round=number, trial=trial.name, entry=entry, value=value, limit=limit, figures=figures)


async def _goodput(target: HttpTarget, trial: Trial, wanted: GoodputPlan, seed: int) -> tuple[float, Figures]:
    """Returns the highest rate inside the limits (0: none was), and what was seen there or at the lowest rate."""
    plan = ServePlan((trial.scenario,), trial.shape, seed=seed, goodput=wanted)
    found = (await search_goodput(plan, wanted, trial.scenario, [target], lambda what: None))[target.name]
    probes = sorted(found.probes, key=lambda probe: (probe.met, probe.rate if probe.met else -probe.rate))
    return found.requests_per_s, probes[-1].figures


def processor() -> str:
    """Returns the processor's name and whether it computes in bfloat16, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    best = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
    return f"{facts.get('model name', platform.machine())}, {best or platform.machine()}"
