"""Reads the vision part of a LLaVA-format checkpoint: configuration, preprocessing, tower and projector weights."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from triptych.errors import InvalidRequest

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
TOWER_WEIGHTS, PROJECTOR_WEIGHTS = "vision_tower.", "multi_modal_projector."
"""What the names of these parts' weights begin with."""

RESAMPLE_NAMES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's filters by their number, as preprocessor configurations hold them."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How an image becomes pixel values: the shortest edge to image_side, centre crop, rescale, normalise."""

    image_side: int
    patch_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    resample: str
    rescale_factor: float


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """The vision part of a checkpoint.

    Attributes:
        vision: `vision_config` as written; defaults are transformers'.
        feature_layers: Hidden states to take, as indices >= 0; 0 is the embeddings, n the output of layer n.
        select_strategy: `default` leaves the class token out, `full` keeps it.
        projector_act: transformers' name of the projector's activation.
        hidden_size: Width of the decoder.
        tower: Weights by name below the tower (`embeddings...`, `encoder.layers...`), float32.
        projector: Weights by name below the projector (`linear_1.weight`, ...), float32.
    """

    vision: dict[str, Any]
    feature_layers: tuple[int, ...]
    select_strategy: str
    projector_act: str
    hidden_size: int
    preprocessing: Preprocessing
    tower: dict[str, torch.Tensor]
    projector: dict[str, torch.Tensor]

    def fingerprint(self) -> str:
        """Returns a SHA-256, in hex, over weights, structure and preprocessing: equal means equal features."""
        structure = [self.vision, self.feature_layers, self.select_strategy, self.projector_act]
        digest = hashlib.sha256(json.dumps([structure, asdict(self.preprocessing)], sort_keys=True).encode())
        for part in (self.tower, self.projector):
            for name in sorted(part):
                tensor = part[name].contiguous()
                digest.update(f"\n{name} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.numpy().data.cast("B"))
        return digest.hexdigest()


def read_checkpoint(folder: Path) -> VisionCheckpoint:
    """Reads a checkpoint folder. Raises InvalidRequest saying which file or field does not fit."""
    config = read_json(folder / "config.json")
    if config.get("model_type") != "llava" or "vision_config" not in config:
        raise InvalidRequest(
            f"{folder} is not a LLaVA-format checkpoint: its config.json has model_type "
            f"{config.get('model_type')!r}, expected 'llava' with a vision_config",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    vision = config["vision_config"]
    if vision.get("model_type") != "clip_vision_model":
        raise InvalidRequest(
            f"the vision tower of {folder} is {vision.get('model_type')!r}; only CLIP towers (clip_vision_model) "
            "can be exported",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise InvalidRequest(
            f"vision_feature_select_strategy is {strategy!r}, expected 'default' or 'full'",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    text = config.get("text_config", {})
    tower, projector = read_weights(folder)
    return VisionCheckpoint(
        vision=vision,
        feature_layers=resolve_layers(config.get("vision_feature_layer", -2), vision.get("num_hidden_layers", 12)),
        select_strategy=strategy,
        projector_act=config.get("projector_hidden_act", "gelu"),
        hidden_size=int(text.get("hidden_size") or projector["linear_2.weight"].shape[0]),
        preprocessing=read_preprocessing(folder, vision),
        tower=tower,
        projector=projector,
    )


def resolve_layers(layers: int | list[int], depth: int) -> tuple[int, ...]:
    """Returns `vision_feature_layer` as indices >= 0 into the depth + 1 hidden states."""
    chosen = [layers] if isinstance(layers, int) else list(layers)
    resolved = [layer + depth + 1 if layer < 0 else layer for layer in chosen]
    if not resolved or not all(0 <= layer <= depth for layer in resolved):
        raise InvalidRequest(
            f"vision_feature_layer {layers} does not fit a tower of {depth} layers", reason="CHECKPOINT_UNSUPPORTED"
        )
    return tuple(resolved)


def read_preprocessing(folder: Path, vision: dict[str, Any]) -> Preprocessing:
    """Returns what preprocessor_config.json, or processor_config.json, says; what is missing is CLIP's."""
    config: dict[str, Any] = {}
    if (folder / "processor_config.json").is_file():
        config |= read_json(folder / "processor_config.json").get("image_processor") or {}
    if (folder / "preprocessor_config.json").is_file():
        config |= read_json(folder / "preprocessor_config.json")
    normalise = config.get("do_normalize", True)
    return Preprocessing(
        image_side=int(vision.get("image_size", 224)),
        patch_size=int(vision.get("patch_size", 32)),
        image_mean=tuple(config.get("image_mean") or CLIP_MEAN) if normalise else (0.0, 0.0, 0.0),
        image_std=tuple(config.get("image_std") or CLIP_STD) if normalise else (1.0, 1.0, 1.0),
        resample=RESAMPLE_NAMES[int(config.get("resample", 3))],
        rescale_factor=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
    )


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns (tower, projector) in float32, reading nothing of the language model."""
    weights = read_tensors(folder, (TOWER_WEIGHTS, PROJECTOR_WEIGHTS))
    tower, projector = without_level(below(TOWER_WEIGHTS, weights)), below(PROJECTOR_WEIGHTS, weights)
    if not tower or "linear_2.weight" not in projector:
        raise InvalidRequest(
            f"{folder} holds no {'vision_tower' if not tower else 'multi_modal_projector'} weights",
            reason="CHECKPOINT_UNSUPPORTED",
        )
    return tower, projector


def read_tensors(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """Returns the weights whose names, `model.` aside, begin with one of the prefixes, in float32."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 -- not a dict
                    if name.removeprefix("model.").startswith(prefixes):
                        tensors[name.removeprefix("model.")] = weights.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"cannot read {file}: {error}", reason="CHECKPOINT_CORRUPT") from error
    return tensors


def below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def without_level(tower: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a tower's weights as transformers 5 names them: the hub's spelling has one level more."""
    return {name.removeprefix("vision_model."): tensor for name, tensor in tower.items()}


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the safetensors files, shards included. Raises InvalidRequest when one is missing."""
    index = folder / "model.safetensors.index.json"
    names = set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InvalidRequest(
                f"{folder / name} does not exist; weights must be safetensors (other formats are not read)",
                reason="CHECKPOINT_INCOMPLETE",
            )
        yield folder / name


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file. Raises InvalidRequest when it is missing or not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path} does not exist: is {path.parent} a checkpoint?", reason="CHECKPOINT_INCOMPLETE"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", reason="CHECKPOINT_CORRUPT") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} does not hold a JSON object", reason="CHECKPOINT_CORRUPT")
    return content
