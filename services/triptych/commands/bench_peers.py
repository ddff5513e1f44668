"""`triptych bench peers`."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

    from triptych.bench.peers.contestant import Contestant
    from triptych.bench.peers.results import Results
    from triptych.bench.peers.trials import Trial

ENVIRONMENTS = Path.home() / ".cache" / "triptych" / "peers"
DTYPES = ("bfloat16", "float32")


def peers(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:TYPE]",
            help="triptych, vllm, llamacpp, openvino or transformers, in bfloat16, float16 or float32; may be repeated "
            "(default: each that is installed, in bfloat16 and float32)",
        ),
    ] = None,
    trial: Annotated[
        list[str] | None,
        typer.Option(
            help="decode-1, prefill-1024, streams-16, text-bursts; for models that see image-1, images-8, image-again, "
            "mixed-light, mixed, mixed-heavy; may be repeated (default: all that fit the model)"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, each beginning with another engine")] = 3,
    model: Annotated[
        str, typer.Option(help="checkpoint folder, or a name that `triptych bench model` knows")
    ] = "smollm2-135m",
    environments: Annotated[
        Path, typer.Option(envvar="TRIPTYCH_BENCH_PEERS", help="where the peers' environments are")
    ] = ENVIRONMENTS,
    install: Annotated[list[str] | None, typer.Option(help="makes a peer's environment, and does no more")] = None,
    commands: Annotated[
        bool, typer.Option("--commands", help="print how each engine is started, in the shell's words, and do no more")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="JSON file that this run's rounds are added to")] = None,
    only_report: Annotated[bool, typer.Option("--only-report", help="measure nothing, read --results")] = False,
    report: Annotated[Path | None, typer.Option(help="Markdown file whose tables and picture are renewed")] = None,
    logs: Annotated[Path | None, typer.Option(help="file for what all engines print")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Compares our stack with vLLM, llama.cpp, OpenVINO GenAI and transformers on the same model, by one client."""
    from rich.console import Console

    from triptych.bench.peers.picture_trials import ALL_TRIALS, section_of
    from triptych.bench.peers.results import read_results
    from triptych.bench.peers.summary import judge, summarise
    from triptych.bench.peers.table import tables_of, write_report

    console = Console(stderr=as_json)
    if install:
        for name in install:
            _install(name, environments, console)
        return
    if commands:
        model_dir = _model_dir(model, environments, console)
        for contestant in make_contestants(engine or [], model_dir, environments.resolve()):
            print(f"# {contestant.name}: {contestant.url}")
            for words in how_to_start(contestant):
                print(words)
        return
    known = {one.name: one for one in ALL_TRIALS}
    if unknown := [name for name in trial or () if name not in known]:
        raise InvalidRequest(f"{unknown[0]!r} is none of {', '.join(known)}")
    if only_report:
        if results is None:
            raise typer.BadParameter("needs --results", param_hint="--only-report")
        found = read_results(results)
    else:
        before = read_results(results) if results is not None and results.exists() else None

        def joined(new: "Results") -> "Results":
            return before.joined(new) if before else new

        def keep(new: "Results") -> None:
            if results is not None:
                results.write_text(joined(new).model_dump_json(), "utf-8")

        wanted = [known[name] for name in trial or ()]
        found = joined(_measure(engine or [], wanted, rounds, model, environments, logs, console, keep))
    measured = {sample.trial for sample in found.samples}
    trials = [one for one in ALL_TRIALS if one.name in measured and (not trial or one.name in trial)]
    for table in tables_of(found, trials):
        console.print(table)
    if report is not None:
        picture = write_report(found, trials, report, section_of(found))
        console.print(f"wrote {report} and {picture}", highlight=False, soft_wrap=True)
    if as_json:
        verdicts = judge(found, trials, same_type=True)
        keys: dict[str, object] = {}
        for one in verdicts:
            prefix = f"{one.trial}_{one.ours.rpartition('-')[2]}".replace("-", "_")
            keys[f"{prefix}_ratio_to_best_peer"] = one.ratio.median
            keys[f"{prefix}_share_of_limit"] = one.share_of_limit and one.share_of_limit.median
            keys[f"{prefix}_met"] = one.met
        keys["model"], keys["machine"] = found.model, found.machine
        keys["entries"] = [one.model_dump() for one in found.entries]
        keys["rows"] = [one.model_dump() for one in summarise(found, trials)]
        keys["verdicts"] = [one.model_dump() for one in verdicts]
        keys["verdicts_any_type"] = [one.model_dump() for one in judge(found, trials, same_type=False)]
        print(json.dumps(keys))


def _install(name: str, environments: Path, console: "Console") -> None:
    from triptych.bench.peers.catalog import PEERS
    from triptych.bench.peers.peer import create_environment

    if name not in PEERS:
        raise InvalidRequest(f"{name!r} is none of {', '.join(PEERS)}")
    for command in create_environment(PEERS[name], (environments / name).resolve()):
        console.print(" ".join(command.argv[:6]).splitlines()[0], highlight=False, markup=False, soft_wrap=True)
        if code := subprocess.run(command.argv, env=command.environment, check=False).returncode:
            raise Unavailable(f"{name}: {command.argv[0]} ended with exit code {code}")


def _measure(
    engines: list[str],
    trials: "list[Trial]",
    rounds: int,
    model: str,
    environments: Path,
    logs: Path | None,
    console: "Console",
    keep: "Callable[[Results], None]",
) -> "Results":
    from triptych.bench.peers.measure import Plan, compare, convert
    from triptych.bench.peers.picture_trials import trials_for

    model_dir = _model_dir(model, environments, console)
    trials = trials or list(trials_for(model_dir))
    contestants = make_contestants(engines, model_dir, environments.resolve())
    with ExitStack() as exits:
        log = exits.enter_context(logs.open("a", encoding="utf-8")) if logs else None

        def sink(name: str, line: str) -> None:
            if log is not None:
                print(f"{name} | {line}", file=log, flush=True)

        def progress(what: str) -> None:
            console.print(what, style="dim", highlight=False, markup=False, soft_wrap=True)

        for contestant in contestants:
            convert(contestant, progress)
        plan = Plan(model_dir, contestants, trials, rounds)
        return asyncio.run(_until_told(compare(plan, sink, progress, keep)))


def _model_dir(model: str, environments: Path, console: "Console") -> Path:
    """Returns the checkpoint as other engines like it."""
    from triptych.bench.engine.checkpoint import MODELS
    from triptych.bench.peers.contestant import make_plain
    from triptych.commands.bench_engine import bench_checkpoint

    folder = bench_checkpoint(console, model) if model in MODELS else Path(model)
    return make_plain(folder, environments.resolve() / "models")


def how_to_start(contestant: "Contestant") -> list[str]:
    """Returns the commands that convert the model and start the services, with the variables that they set."""
    started = [(one.argv, one.environment) for one in contestant.conversions]
    started += [(one.argv, dict(one.env)) for one in contestant.services]
    lines = []
    for argv, environment in started:
        own = [f"{key}={value}" for key, value in environment.items() if os.environ.get(key) != value]
        lines.append(shlex.join(["env", *own, *argv] if own else argv))
    return lines


async def _until_told(comparison: "Coroutine[Any, Any, Results]") -> "Results":
    """Runs a comparison that SIGTERM ends as Ctrl-C does: engines that sleep would not see their parent's end."""
    task = asyncio.ensure_future(comparison)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def make_contestants(engines: list[str], model_dir: Path, environments: Path) -> "list[Contestant]":
    """Returns what NAME[:TYPE] mean; for none, ours and every installed peer, each in bfloat16 and float32.

    Raises InvalidRequest for what is unknown.
    """
    from triptych.bench.peers.catalog import PEERS
    from triptych.bench.peers.contestant import OURS, make_ours, make_peer
    from triptych.stack import StackSettings

    if not engines:
        engines = [OURS, *(name for name in PEERS if (environments / name).is_dir())]
    made = []
    for value in engines:
        name, _, dtype = value.partition(":")
        if name != OURS and name not in PEERS:
            raise InvalidRequest(f"{name!r} is none of {OURS}, {', '.join(PEERS)}")
        offered = DTYPES if name == OURS else PEERS[name].dtypes
        if dtype and dtype not in offered:
            raise InvalidRequest(f"{name} computes in {', '.join(offered)}, not in {dtype!r}")
        for one in [dtype] if dtype else [one for one in DTYPES if one in offered]:
            if name == OURS:
                made.append(make_ours(model_dir, one, StackSettings.from_environment(), environments))
            else:
                made.append(make_peer(PEERS[name], one, model_dir, environments))
    return made
