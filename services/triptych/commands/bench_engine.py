"""`triptych bench engine` and `triptych bench model`."""

import json
import platform
from pathlib import Path
from typing import Annotated, Literal

import typer

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

    from triptych.bench.engine.checkpoint import FOLDER, write_smollm2
    from triptych.bench.engine.measure import Plan, measure
    from triptych.bench.engine.table import table_of, write_report
    from triptych.telemetry.logs import setup_logging

    setup_logging("bench")
    console = Console(stderr=as_json)
    if model is None:
        model = FOLDER
        if not (model / "config.json").is_file():
            console.print(f"writing {model}", highlight=False, soft_wrap=True)
            write_smollm2(model)
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


def model(
    folder: Annotated[Path | None, typer.Argument(help="where to write it")] = None,
    as_json: Json = False,
) -> None:
    """Writes the checkpoint that `bench engine` measures: SmolLM2-135M-Instruct in bfloat16."""
    from triptych.bench.engine.checkpoint import FOLDER, write_smollm2

    folder = folder or FOLDER
    write_smollm2(folder)
    print(json.dumps({"folder": str(folder)}) if as_json else f"wrote {folder}")
