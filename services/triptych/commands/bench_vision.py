"""`triptych bench vision`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from triptych.config import bundled


def vision(
    model: Annotated[
        Path | None, typer.Option(help="LLaVA-format checkpoint whose ViT encodes the tiles; unset: the bundled one")
    ] = None,
    images: Annotated[int, typer.Option(min=20, help="images that each rule encodes")] = 200,
    outstanding: Annotated[int, typer.Option(min=1, help="images in queue and encoder at any time")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="equal seeds send equal images")] = 0,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw the result into")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Measures the encoder's memory and speed with batches bounded by pixels and by count, in a real Triton."""
    from rich.console import Console

    from triptych.bench.vision.measure import Plan, measure
    from triptych.bench.vision.report import table_of, write_plot

    console = Console(stderr=as_json)
    with Console(stderr=True).status("starting") as status:
        figures = measure(Plan(model or bundled("models/demo"), images, outstanding, seed), status.update)
    console.print(table_of(figures))
    if plot is not None:
        write_plot(figures, plot)
        console.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    if as_json:
        rules = {
            rule.rule: {
                "peak_bytes": rule.peak_bytes,
                "variation": rule.variation,
                "images_per_s": rule.images_per_s,
                "mean_batch": rule.mean_batch,
                "p50_s": rule.latency_s(0.5),
                "p99_s": rule.latency_s(0.99),
            }
            for rule in (figures.pixels, figures.count)
        }
        print(json.dumps({**figures.keys(), "predicted_bytes": figures.predicted_bytes, "rules": rules}))
