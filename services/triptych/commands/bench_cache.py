"""`triptych bench cache`."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from triptych.bench.cache.capacity import Capacity
    from triptych.bench.cache.tiers import TierTimes

MODEL = "llava-vit-l-14-336"


def cache(
    model: Annotated[Path | None, typer.Option(help=f"checkpoint folder; unset: {MODEL} of `bench model`")] = None,
    repository: Annotated[
        Path | None, typer.Option(help="its Triton repository; unset: beside the checkpoint, exported if need be")
    ] = None,
    pictures: Annotated[int, typer.Option(min=2, help="pictures for each kind of question; medians count")] = 3,
    dialogues: Annotated[int, typer.Option(min=2, help="dialogues that are visited round robin; 2: hardly any")] = 100,
    on_device: Annotated[int, typer.Option(min=1, help="for how many of them the device has KV")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="times each is visited")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Measures what cached KV saves: time to first token by tier, and many dialogues in a small device pool."""
    from rich.console import Console

    from triptych.bench.cache.capacity import measure_capacity
    from triptych.bench.cache.tiers import measure_tiers
    from triptych.telemetry.logs import setup_logging

    setup_logging("bench")
    console = Console(stderr=as_json)
    model = model or _checkpoint()
    repository = repository or _exported(model, console)
    with Console(stderr=True).status("starting") as status:
        times = asyncio.run(measure_tiers(model, repository, pictures, status.update))
        _print_tiers(console, times)
        capacity = measure_capacity(model, dialogues, on_device, turns, status.update)
    _print_capacity(console, capacity)
    if as_json:
        keys: dict[str, Any] = {f"{place}_ratio": times.ratio(place) for place in ("device", "host", "disk")}
        keys["hit_rate"] = capacity.hit_rate
        keys["capacity_ratio"] = capacity.recompute_s / capacity.tiered_s
        keys["capacity"] = asdict(capacity)
        keys["cached_tokens"] = times.cached_tokens
        keys["prompt_tokens"] = times.prompt_tokens
        keys["ttft_s"] = {
            place: {kind: spread.model_dump() for kind, spread in kinds.items()}
            for place, kinds in times.seconds.items()
        }
        print(json.dumps(keys))


def _checkpoint() -> Path:
    from triptych.bench.engine.checkpoint import bench_checkpoint

    return bench_checkpoint(MODEL)


def _exported(model: Path, console: Any) -> Path:
    from triptych.vision.export import export

    repository = model.with_name(f"{model.name}-repository")
    if not (repository / "vision" / "config.pbtxt").is_file():
        console.print(f"exporting the encoder to {repository}", highlight=False, soft_wrap=True)
        export(model, repository, 1)
    return repository


def _print_tiers(console: Any, times: "TierTimes") -> None:
    from rich.table import Table

    table = Table("KV from", "second turn", "another's first question", "times sooner", "cached tokens")
    for place, kinds in times.seconds.items():
        cells = [
            f"{kinds[kind].median * 1000:.0f} ms ({kinds[kind].low * 1000:.0f} to {kinds[kind].high * 1000:.0f})"
            for kind in ("second_turn", "first_question")
        ]
        cached = f"{times.cached_tokens[place]} of {times.prompt_tokens}"
        table.add_row(place, *cells, f"{times.ratio(place):.1f}", cached)
    console.print(table)


def _print_capacity(console: Any, capacity: "Capacity") -> None:
    console.print(
        f"{capacity.dialogues} dialogues, {capacity.turns} turns each, round robin: hit rate {capacity.hit_rate:.1%}, "
        f"{capacity.tiered_s:.1f} s with tiers, {capacity.recompute_s:.1f} s without",
        highlight=False,
    )
