"""`triptych bench encoder`."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer


def encoder(
    repository: Annotated[
        Path | None, typer.Option(help="folder that `triptych export` wrote; unset: the demo's")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="how many; the median counts")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Times the vision encoder in Triton, one picture after another, with this environment's ONNX Runtime."""
    from rich.console import Console

    from triptych.bench.encoder import measure_encoder
    from triptych.config import TritonSettings
    from triptych.stack import StackSettings

    settings = StackSettings.from_environment()
    if repository is not None:
        settings = StackSettings(
            TritonSettings(model_repository=repository, start_timeout_s=300.0), settings.worker, settings.router
        )
    with Console(stderr=True).status("timing"):
        figures = asyncio.run(measure_encoder(settings, pictures, lambda name, line: None))
    seconds = figures.seconds
    Console(stderr=as_json).print(
        f"{figures.image_side} px, ONNX Runtime {figures.onnxruntime}, {figures.provider}: {figures.images_per_s:.3g} "
        f"pictures/s, {seconds.median:.3g} s each ({seconds.low:.3g} to {seconds.high:.3g})",
        highlight=False,
    )
    if as_json:
        print(json.dumps({**figures.model_dump(), "images_per_s": figures.images_per_s}))
