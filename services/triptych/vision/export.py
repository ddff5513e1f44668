"""`triptych export`: the vision part of a LLaVA-format checkpoint as a Triton model repository."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import onnxruntime
import torch

from triptych.errors import InvalidRequest
from triptych.vision.encoder_spec import versioned_name
from triptych.vision.export_checkpoint import VisionCheckpoint, read_checkpoint
from triptych.vision.export_graph import Projector, VisionEncoder, check_onnx, write_encoder, write_projector
from triptych.vision.export_repository import (
    KEPT_VERSIONS,
    TensorText,
    ensemble_config,
    onnx_config,
    publish,
    stage_model,
    staging_area,
    versioned_ensembles,
)

ENCODER, PROJECTOR, ENSEMBLE = "vision_encoder", "projector", "vision"

MAX_BATCH_SIZE = 256
"""Most images in one run of the encoder; it is the router's pixel budget that bounds them."""


def export(
    model_dir: Path,
    repository: Path,
    version: int = 1,
    progress: Callable[[str], None] = lambda line: print(line, flush=True),
) -> None:
    """Writes encoder, projector and their ensemble `vision` as `version` into `repository`.

    Both graphs are compared with torch before anything is put in place; a failed or interrupted export leaves the
    repository as it was. `progress` gets one line per step.

    Raises InvalidRequest (not a LLaVA-format checkpoint, a file missing or damaged, the repository not writable) and
    TriptychError when a graph does not compute what torch does.
    """
    if version < 1:
        raise InvalidRequest(f"version must be at least 1, not {version}", reason="INVALID_VERSION")
    with staging_area(repository) as area:
        progress(f"reading {model_dir}")
        checkpoint = read_checkpoint(model_dir)
        encoder, projector = VisionEncoder(checkpoint).eval(), Projector(checkpoint).eval()
        pixels = TensorText("pixel_values", (3, -1, -1))
        features = TensorText("features", (-1, projector.linear_1.in_features))
        projected = TensorText("image_features", (-1, checkpoint.hidden_size))
        accelerator = best_accelerator()
        if accelerator:
            progress(f"Triton is to use {accelerator} where it runs on CPU")
        encoder_config = onnx_config(ENCODER, pixels, features, MAX_BATCH_SIZE, cpu_accelerator=accelerator)
        encoder_file = stage_model(area, repository, ENCODER, version, encoder_config) / "model.onnx"
        projector_config = onnx_config(PROJECTOR, features, projected, MAX_BATCH_SIZE, cpu_accelerator=accelerator)
        projector_file = stage_model(area, repository, PROJECTOR, version, projector_config) / "model.onnx"
        # The router asks for one version by its name; `vision` is whatever is the newest, for everybody else.
        ensembles = {ENSEMBLE: -1, versioned_name(ENSEMBLE, version): version}
        for name, pinned in ensembles.items():
            parameters = {"triptych": router_parameter(checkpoint)}
            models = (ENCODER, PROJECTOR)
            config = ensemble_config(name, models, pixels, features, projected, MAX_BATCH_SIZE, parameters, pinned)
            # An ensemble has no file of its own, but Triton wants the folder, and git keeps none that is empty.
            (stage_model(area, repository, name, version, config) / ".gitkeep").touch()
        preprocessing = checkpoint.preprocessing
        progress(f"exporting {ENCODER} ({count_parameters(encoder)}, {len(encoder.layers)} layers)")
        write_encoder(encoder, encoder_file, preprocessing.patch_size)
        progress(f"exporting {PROJECTOR} ({count_parameters(projector)})")
        write_projector(projector, projector_file, projector.linear_1.in_features)
        progress("comparing with torch")
        outputs = check_onnx(encoder_file, encoder, *probe_images(preprocessing.image_side, preprocessing.patch_size))
        check_onnx(projector_file, projector, *outputs)
        old = versioned_ensembles(repository, ENSEMBLE) - {version}
        dropped = sorted(old, reverse=True)[KEPT_VERSIONS - 1 :]
        names = [ENCODER, PROJECTOR, *ensembles, *(versioned_name(ENSEMBLE, number) for number in dropped)]
        publish(area, repository, tuple(names))
    progress(f"wrote {repository}: {ENCODER}, {PROJECTOR} and {ENSEMBLE}, version {version}")
    served = max(versioned_ensembles(repository, ENSEMBLE))
    if served > version:
        progress(f"note: the highest version is served, which is {served}, not {version}")


def best_accelerator() -> str | None:
    """Returns the accelerator that this environment's onnxruntime has for the CPU, as Triton's config names it."""
    return "openvino" if "OpenVINOExecutionProvider" in onnxruntime.get_available_providers() else None


def router_parameter(checkpoint: VisionCheckpoint) -> str:
    """Returns what the router needs to know about the encoder, as JSON; see `encoder_spec`."""
    return json.dumps(
        {
            **asdict(checkpoint.preprocessing),
            "hidden_size": checkpoint.hidden_size,
            "select_strategy": checkpoint.select_strategy,
            "fingerprint": checkpoint.fingerprint(),
        }
    )


def probe_images(side: int, patch: int) -> list[torch.Tensor]:
    """Returns random inputs for the check: native size, and a smaller oblong batch that needs interpolation."""
    generator = torch.Generator().manual_seed(0)
    half = max(1, side // patch // 2) * patch
    sizes = [(1, 3, side, side), (2, 3, half, half + patch)]
    return [torch.randn(size, generator=generator) for size in sizes]


def count_parameters(module: torch.nn.Module) -> str:
    """Returns a module's parameter count in words, e.g. `0.8 M parameters`."""
    return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:.1f} M parameters"
