"""`triptych export --draft`: a small tower that imitates the encoder, and its projection into the same space."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from triptych.errors import InvalidRequest
from triptych.vision.export import (
    MAX_BATCH_SIZE,
    best_accelerator,
    count_parameters,
    probe_images,
    router_parameter,
)
from triptych.vision.export_checkpoint import (
    PROJECTOR_WEIGHTS,
    VisionCheckpoint,
    below,
    read_checkpoint,
    read_json,
    read_tensors,
    without_level,
)
from triptych.vision.export_graph import Projector, VisionEncoder, check_onnx, write_encoder, write_projector
from triptych.vision.export_repository import (
    TensorText,
    ensemble_config,
    onnx_config,
    publish,
    stage_model,
    staging_area,
)

ENCODER, PROJECTOR, ENSEMBLE = "vision_encoder_draft", "projector_draft", "vision_draft"


def export_draft(
    model_dir: Path,
    draft_dir: Path,
    repository: Path,
    version: int = 1,
    progress: Callable[[str], None] = lambda line: print(line, flush=True),
) -> None:
    """Writes the draft tower in `draft_dir`, its projector and the ensemble `vision_draft` of both into `repository`.

    The draft takes the same pixels as the encoder of the checkpoint in `model_dir` and gives as many features of the
    same width. Raises as `export` does.
    """
    if version < 1:
        raise InvalidRequest(f"version must be at least 1, not {version}", reason="INVALID_VERSION")
    with staging_area(repository) as area:
        progress(f"reading {draft_dir}")
        draft = read_draft(draft_dir, read_checkpoint(model_dir))
        encoder, projector = VisionEncoder(draft).eval(), Projector(draft).eval()
        width = projector.linear_1.in_features
        pixels = TensorText("pixel_values", (3, -1, -1))
        features, projected = TensorText("features", (-1, width)), TensorText("image_features", (-1, draft.hidden_size))
        accelerator = best_accelerator()
        encoder_config = onnx_config(ENCODER, pixels, features, MAX_BATCH_SIZE, cpu_accelerator=accelerator)
        encoder_file = stage_model(area, repository, ENCODER, version, encoder_config) / "model.onnx"
        projector_config = onnx_config(PROJECTOR, features, projected, MAX_BATCH_SIZE, cpu_accelerator=accelerator)
        projector_file = stage_model(area, repository, PROJECTOR, version, projector_config) / "model.onnx"
        parameters = {"triptych": router_parameter(draft)}
        models = (ENCODER, PROJECTOR)
        ensemble = ensemble_config(ENSEMBLE, models, pixels, features, projected, MAX_BATCH_SIZE, parameters)
        (stage_model(area, repository, ENSEMBLE, version, ensemble) / ".gitkeep").touch()
        progress(f"exporting {ENCODER} ({count_parameters(encoder)}, {len(encoder.layers)} layers) and {PROJECTOR}")
        write_encoder(encoder, encoder_file, draft.preprocessing.patch_size)
        write_projector(projector, projector_file, width)
        progress("comparing with torch")
        sizes = probe_images(draft.preprocessing.image_side, draft.preprocessing.patch_size)
        check_onnx(projector_file, projector, *check_onnx(encoder_file, encoder, *sizes))
        publish(area, repository, (ENCODER, PROJECTOR, ENSEMBLE))
    progress(f"wrote {repository}: {ENCODER}, {PROJECTOR} and {ENSEMBLE}, version {version}")


def read_draft(folder: Path, target: VisionCheckpoint) -> VisionCheckpoint:
    """Returns the draft as a checkpoint: its tower's last layer, and its own projector or else the target's.

    The folder is as transformers saves a CLIPVisionModel; weights named `multi_modal_projector.…` in it are its own
    projector. Raises InvalidRequest when it does not fit the target.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") != "clip_vision_model":
        raise InvalidRequest(
            f"{folder} holds {config.get('model_type')!r}; a draft is a clip_vision_model, as CLIPVisionModel saves it",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    for name in ("patch_size", "image_size"):
        if config.get(name) != target.vision.get(name):
            raise InvalidRequest(
                f"{name} is {config.get(name)} in the draft, {target.vision.get(name)} in the encoder; "
                "they must be equal",
                reason="CHECKPOINT_UNSUPPORTED",
            )
    weights = read_tensors(folder)
    projector = below(PROJECTOR_WEIGHTS, weights) or target.projector
    width = projector["linear_1.weight"].shape[1]
    if config.get("hidden_size") != width or projector["linear_2.weight"].shape[0] != target.hidden_size:
        raise InvalidRequest(
            f"the draft gives features of {config.get('hidden_size')}, the projector takes {width}; a draft of another "
            "width needs multi_modal_projector weights of its own in its folder",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    depth = int(config.get("num_hidden_layers", 12))
    tower = {name: tensor for name, tensor in weights.items() if not name.startswith(PROJECTOR_WEIGHTS)}
    return replace(target, vision=config, feature_layers=(depth,), tower=without_level(tower), projector=projector)
