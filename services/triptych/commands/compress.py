"""`triptych compress`: fits principal components of visual KV to pictures."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from triptych.config import WorkerSettings
from triptych.demo.drawing import random_scene
from triptych.demo.scenes import draw, training_rng
from triptych.errors import InvalidRequest
from triptych.vision.features import LocalEncoder
from triptych.vision.image_header import ImageLimits
from triptych.vision.images import load_image
from triptych.worker.calibration import fit_basis
from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.low_rank import FILE_NAME
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.prompt import ImageSlot, Turn

_SEED = 2
"""Of the scenes: none is held out, so `triptych evaluate` asks about pictures that were not looked at."""
_LIMITS = ImageLimits(20 << 20, 64_000_000)


def run(model_dir: Path, images: Path | None, count: int, output: Path | None, as_json: bool) -> None:
    """Writes the components to `output`, by default beside the weights, and prints where they are.

    Raises InvalidRequest when the folder is no checkpoint, holds no pictures, or one of them is none.
    """
    encoder = LocalEncoder(model_dir)
    model = load_model(WorkerSettings(model_dir=model_dir, offload_kv_bytes=0))
    pictures = _drawn(encoder.spec.image_side) if images is None else _pictures(images)
    console = Console(stderr=True)
    shown = track(islice(pictures, count), "looking at pictures", total=count, console=console)
    basis = fit_basis(model, (_example(model, encoder.features(picture)) for picture in shown))
    path = output or model_dir / FILE_NAME
    basis.save(path, model.fingerprint)
    size = path.stat().st_size
    print(json.dumps({"file": str(path), "bytes": size}) if as_json else f"wrote {path}, {size / 1e6:.2f} MB")


def _example(model: LoadedModel, features: Tensor) -> tuple[TokenizedPrompt, Tensor]:
    return model.prompts.encode([Turn("user", (ImageSlot(bytes(32), len(features)), " "))]), features


def _drawn(side: int) -> Iterator[Image.Image]:
    index = 0
    while True:
        yield draw(random_scene(training_rng(_SEED, index)), side)
        index += 1


def _pictures(folder: Path) -> Iterator[Image.Image]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise InvalidRequest(f"{folder} holds no pictures")
    for path in files:
        yield load_image(path.read_bytes(), _LIMITS)
