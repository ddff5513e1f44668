"""`triptych bench`: measures servers with one client, and the engine alone."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from triptych.commands import bench_cache, bench_encoder, bench_engine, bench_peers, bench_vision, bench_visual_kv

if TYPE_CHECKING:  # The command line starts quickly: what measures is imported when something is measured.
    from triptych.bench.benchmark import GoodputPlan, Plan
    from triptych.bench.report import Report
    from triptych.bench.targets.target import Target

app = typer.Typer(help="Measures servers and the engine.", no_args_is_help=True)
app.command()(bench_cache.cache)
app.command()(bench_engine.engine)
app.command()(bench_encoder.encoder)
app.command()(bench_engine.speculation)
app.command()(bench_engine.draft)
app.command()(bench_engine.model)
app.command()(bench_peers.peers)
app.command()(bench_vision.vision)
app.command()(bench_visual_kv.visual_kv)

SCENARIO_NAMES = ("text", "one-image", "four-images", "repeated-image", "multi-turn", "mixed", "text-bursts")
DEFAULT_URL = "http://127.0.0.1:8080/v1"


def _complete_scenario(incomplete: str) -> list[str]:
    return [name for name in SCENARIO_NAMES if name.startswith(incomplete)]


@app.command("serve")
def serve(
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help=f"an OpenAI-compatible server, with /v1; repeat it to compare several (default {DEFAULT_URL})",
        ),
    ] = None,
    grpc: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]HOST:PORT", help="a router of ours over gRPC; may be repeated")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=_complete_scenario,
            help=f"what to send: {', '.join(SCENARIO_NAMES)}; may be repeated (default text)",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="model to ask; unset: the first that the server lists")] = "",
    concurrency: Annotated[int | None, typer.Option(min=1, help="requests at once (default 1)")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="requests per second, Poisson, instead")] = None,
    requests: Annotated[int, typer.Option(min=1, help="conversations in a round")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="rounds per server")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="conversations per server that are not counted")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="equal seeds send equal requests")] = 0,
    own_content: Annotated[
        bool, typer.Option("--own-content", help="requests of its own for each server, where they share caches")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="words of text per turn, about a token each")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 64,
    picture_side: Annotated[int, typer.Option(min=8, help="pixels per side")] = 512,
    dialect: Annotated[
        Literal["auto", "openai", "triptych", "vllm", "ignore-eos"],
        typer.Option(help="how the server is told to ignore the end of sequence; auto: by the owner of its model"),
    ] = "auto",
    api_key: Annotated[str, typer.Option(envvar="TRIPTYCH_BENCH_API_KEY", help="sent as bearer token")] = "",
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="fields added to every HTTP request")] = "{}",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="longest time for one answer")] = 600.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="searches goodput: limit on p99 time to first token")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.001, help="searches goodput: limit on p99 time per output token")
    ] = None,
    start_rate: Annotated[float, typer.Option(min=0.001, help="goodput: first rate tried, per second")] = 1.0,
    max_rate: Annotated[float, typer.Option(min=0.001, help="goodput: highest rate tried, per second")] = 1000.0,
    probe_s: Annotated[float, typer.Option(min=0.1, help="goodput: seconds of arrivals at each rate")] = 20.0,
    max_probes: Annotated[int, typer.Option(min=1, help="goodput: most rates tried")] = 10,
    out: Annotated[Path | None, typer.Option(help="folder for report.json and plots")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Sends the same requests to one or several servers and reports latency, throughput and goodput."""
    from triptych.bench.benchmark import Plan
    from triptych.bench.pacing import Concurrency, Rate
    from triptych.bench.scenarios import SCENARIOS, Shape

    scenarios = tuple(scenario or ["text"])
    for name in scenarios:
        if name not in SCENARIOS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(SCENARIOS)}", param_hint="--scenario")
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("choose either --rate or --concurrency", param_hint="--rate")
    if (slo_ttft_ms is None) != (slo_tpot_ms is None):
        raise typer.BadParameter("goodput needs both --slo-ttft-ms and --slo-tpot-ms", param_hint="--slo-ttft-ms")
    if start_rate > max_rate:
        raise typer.BadParameter("it is above --max-rate", param_hint="--start-rate")
    goodput = None
    if slo_ttft_ms is not None and slo_tpot_ms is not None:
        goodput = _goodput(slo_ttft_ms / 1000, slo_tpot_ms / 1000, start_rate, max_rate, probe_s, max_probes)
    plan = Plan(
        scenarios=scenarios,
        shape=Shape(prompt_tokens, output_tokens, picture_side),
        pacing=Rate(rate) if rate is not None else Concurrency(concurrency or 1),
        requests=requests,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        own_content=own_content,
        goodput=goodput,
    )
    http = {"model": model, "dialect": dialect, "api_key": api_key, "extra_body": _json_object(extra_body)}
    targets = make_targets(url or ([] if grpc else [DEFAULT_URL]), grpc or [], timeout_s, http)
    sys.exit(run(plan, targets, out, as_json))


@app.command("schema")
def schema() -> None:
    """Prints the JSON Schema of the report."""
    from triptych.bench.report import Report

    print(json.dumps(Report.model_json_schema()))


def run(plan: "Plan", targets: "list[Target]", out: Path | None, as_json: bool) -> int:
    """Measures, prints the table (stderr with `as_json`), writes files; returns 1 if a request failed, else 0.

    The JSON object on the last line is the report without single requests; the file has them.
    """
    from rich.console import Console

    from triptych.bench.plots import write_plots
    from triptych.bench.table import tables_of
    from triptych.errors import Unavailable

    console = Console(stderr=as_json)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(_measure(plan, targets))
    for table in tables_of(report):
        console.print(table)
    if out is not None:
        (out / "report.json").write_text(report.model_dump_json(), encoding="utf-8")
        console.print(f"wrote {out / 'report.json'}", highlight=False, soft_wrap=True)
        try:
            for path in write_plots(report, out):
                console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        except Unavailable as error:
            console.print(error.message, style="yellow", highlight=False, markup=False)
    if as_json:
        print(report.model_dump_json(exclude={"results": {"__all__": {"rounds": {"__all__": {"requests"}}}}}))
    return 1 if any(result.summary.errors for result in report.results) else 0


async def _measure(plan: "Plan", targets: "list[Target]") -> "Report":
    from rich.console import Console

    from triptych.bench.benchmark import run_benchmark

    with Console(stderr=True).status("starting") as status:
        try:
            return await run_benchmark(plan, targets, status.update)
        finally:
            for target in targets:
                await target.close()


def make_targets(urls: list[str], addresses: list[str], timeout_s: float, http: dict[str, Any]) -> "list[Target]":
    """Returns the servers to measure, URLs first. `http` are further arguments of HttpTarget.

    Raises typer.BadParameter when two have one name.
    """
    from triptych.bench.targets.grpc import GrpcTarget
    from triptych.bench.targets.http import HttpTarget

    targets: list[Target] = []
    for value in urls:
        name, url = _named(value)
        targets.append(HttpTarget(url, name=name, timeout_s=timeout_s, **http))
    for value in addresses:
        name, address = _named(value)
        targets.append(GrpcTarget(address, name=name, timeout_s=timeout_s))
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"servers need different names, got {', '.join(names)}", param_hint="--url")
    return targets


def _named(value: str) -> tuple[str, str]:
    """Splits NAME=ADDRESS; a `=` after the first `/` belongs to the URL."""
    name, separator, address = value.partition("=")
    return (name, address) if separator and "/" not in name else ("", value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--extra-body")
    return value


def _goodput(
    ttft_s: float, tpot_s: float, start_rate: float, max_rate: float, probe_s: float, max_probes: int
) -> "GoodputPlan":
    from triptych.bench.benchmark import GoodputPlan
    from triptych.bench.goodput import Slo

    return GoodputPlan(Slo(ttft_s, tpot_s), start_rate, max_rate, probe_s, max_probes)
