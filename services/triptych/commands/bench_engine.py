"""`triptych bench engine`, `bench speculation`, `bench draft` and `bench model`."""

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def engine(
    model: Annotated[
        Path | None, typer.Option(help="checkpoint folder; unset: the one of `triptych bench model`, made if need be")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="of weights and cache")] = "bfloat16",
    weights: Annotated[Literal["auto", "int8"], typer.Option(help="int8: half of bfloat16's bytes")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="threads that compute; unset: as the worker does")] = None,
    sequences: Annotated[list[int] | None, typer.Option(min=1, help="decode; may be repeated (1 4 16 64)")] = None,
    prompts: Annotated[list[int] | None, typer.Option(min=1, help="prefill; may be repeated (256 1024 4096)")] = None,
    samples: Annotated[int, typer.Option(min=3, help="samples of each decode figure; medians count")] = 15,
    control: Annotated[bool, typer.Option(help="run transformers on the same weights beside it")] = True,
    report: Annotated[Path | None, typer.Option(help="Markdown file whose table for this format is renewed")] = None,
    as_json: Json = False,
) -> None:
    """Measures prefill and decode beside the machine's limits and transformers, all in one run."""
    from rich.console import Console

    from triptych.bench.engine.measure import Plan, measure
    from triptych.bench.engine.table import table_of, write_report
    from triptych.telemetry.logs import setup_logging

    setup_logging("bench")
    console = Console(stderr=as_json)
    model = model or bench_checkpoint(console)
    plan = Plan(model_dir=model, dtype=dtype, weights=weights, threads=threads, samples=samples, control=control)
    plan = plan.model_copy(
        update={
            **({"sequences": tuple(sequences)} if sequences else {}),
            **({"prompts": tuple(prompts)} if prompts else {}),
        }
    )
    with Console(stderr=True).status("loading") as status:
        figures = measure(plan, status.update)
    console.print(table_of(figures, plan))
    if report is not None:
        write_report(figures, plan, report)
        console.print(f"wrote {report}", highlight=False, soft_wrap=True)
    if as_json:
        keys: dict[str, object] = {
            f"{figure.kind}_{figure.size}_share_of_limit": figure.share_of_limit.median for figure in figures
        }
        first = next((figure for figure in figures if figure.ratio_to_transformers is not None), None)
        keys["ratio_to_transformers"] = first and first.ratio_to_transformers and first.ratio_to_transformers.median
        keys["machine"] = platform.processor() or platform.machine()
        keys["plan"] = plan.model_dump(mode="json")
        keys["figures"] = [figure.model_dump(mode="json") for figure in figures]
        print(json.dumps(keys))


def speculation(
    model: Annotated[Path | None, typer.Option(help="checkpoint folder; unset: that of `triptych bench model`")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="of weights and cache")] = "bfloat16",
    guesses: Annotated[int, typer.Option(min=1, max=15, help="most tokens guessed at once")] = 7,
    draft_model: Annotated[
        Path | None, typer.Option(help="checkpoint folder that guesses; unset: tokens are guessed from earlier text")
    ] = None,
    draft_weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="of the draft model; it may be the model itself with int8")
    ] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="answers to each prompt; medians count")] = 5,
    as_json: Json = False,
) -> None:
    """Measures what guessing tokens brings; the answers must be the same."""
    from rich.console import Console
    from rich.table import Table

    from triptych.bench.engine.speculation import Guessing, measure_gain

    console = Console(stderr=as_json)
    model = model or bench_checkpoint(console)
    guessing = Guessing(guesses=guesses, draft_model=draft_model, draft_weights=draft_weights)
    with Console(stderr=True).status("loading") as status:
        gains = measure_gain(model, dtype, guessing, samples, status.update)
    source = "earlier text"
    if draft_model is not None:
        source = f"{draft_model.name}{', int8' if draft_weights == 'int8' else ''}"
    title = f"{model.name}, {dtype}, {guesses} guesses from {source}"
    table = Table("prompt", "tokens", "steps", "right guesses", "times as fast", title=title)
    for gain in gains:
        ratio = gain.ratio
        times = f"{ratio.median:.1f} ({ratio.low:.1f} to {ratio.high:.1f})"
        right = f"{gain.confirmed} of {gain.guessed}"
        table.add_row(gain.prompt, str(gain.tokens), str(gain.steps), right, times)
    console.print(table)
    if as_json:
        print(json.dumps({"gains": [gain.model_dump() for gain in gains]}))


def bench_checkpoint(console: "Console", name: str = "smollm2-135m") -> Path:
    """Returns where a bench checkpoint is, and writes it first if need be. Raises InvalidRequest for another name."""
    from triptych.bench.engine import checkpoint

    if not (checkpoint.CACHE / name / "config.json").is_file():
        console.print(f"writing {checkpoint.CACHE / name}", highlight=False, soft_wrap=True)
    return checkpoint.bench_checkpoint(name)


def draft(
    layers: Annotated[int, typer.Option(min=2, help="how many layers to keep")],
    folder: Annotated[Path, typer.Argument(help="where to write it")],
    model: Annotated[Path | None, typer.Option(help="checkpoint folder; unset: that of `triptych bench model`")] = None,
    as_json: Json = False,
) -> None:
    """Writes a draft model for `bench speculation`: the model itself with layers left out, and nothing trained."""
    from rich.console import Console

    from triptych.bench.engine.draft_checkpoint import write_draft

    kept = write_draft(model or bench_checkpoint(Console(stderr=as_json)), layers, folder)
    report = {"folder": str(folder), "layers": kept}
    print(json.dumps(report) if as_json else f"wrote {folder}: layers {', '.join(map(str, kept))}")


def model(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="smollm2-135m, llava-vit-l-14-336, llava-vit-b-16-224; none: all three"),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="folder to keep them in (~/.cache/triptych/bench)")] = None,
    as_json: Json = False,
) -> None:
    """Makes the checkpoints that are measured, unless they are there: SmolLM2-135M-Instruct in bfloat16, and LLaVA
    models of it with a random CLIP tower."""
    from triptych.bench.engine.checkpoint import CACHE, MODELS, bench_checkpoint

    folders = {name: str(bench_checkpoint(name, cache or CACHE)) for name in names or MODELS}
    print(json.dumps({"folders": folders}) if as_json else "\n".join(folders.values()))
