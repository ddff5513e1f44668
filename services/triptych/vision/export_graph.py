"""The encoder and the projector as graphs: torch modules, their ONNX files, and the check that both agree."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.activations import ACT2FN

from triptych.errors import InvalidRequest, TriptychError
from triptych.vision.export_checkpoint import VisionCheckpoint

TOLERANCE = 1e-4
"""Largest difference between ONNX Runtime and torch, relative to the largest value."""

INLINE_LIMIT_BYTES = 1 << 31
"""A protobuf file cannot be larger; bigger weights go to model.onnx.data beside it."""

OPSET = 18


class VisionEncoder(nn.Module):
    """A CLIP tower up to the last layer that is needed.

    [batch, 3, height, width], height and width whole patches, to [batch, tokens, layers * vision_hidden].
    """

    def __init__(self, checkpoint: VisionCheckpoint) -> None:
        super().__init__()
        depth = max(checkpoint.feature_layers)
        config = CLIPVisionConfig(**{**checkpoint.vision, "num_hidden_layers": depth})
        config._attn_implementation = "eager"
        tower = CLIPVisionModel(config)
        # transformers has moved the tower's parts in and out of `vision_model`.
        tower = getattr(tower, "vision_model", tower)
        load_weights(tower, checkpoint.tower, "vision tower")
        self.embeddings = tower.embeddings
        self.pre_norm = tower.pre_layrnorm
        self.layers = tower.encoder.layers
        self.feature_layers = checkpoint.feature_layers
        self.first_token = 1 if checkpoint.select_strategy == "default" else 0
        side = config.image_size // config.patch_size
        positions = self.embeddings.position_embedding.weight.detach()
        self.class_position = nn.Parameter(positions[:1] + self.embeddings.class_embedding.detach())
        self.grid_positions = nn.Parameter(positions[1:].T.reshape(1, -1, side, side).contiguous())
        self.patches = self.embeddings.patch_embedding
        del self.embeddings

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Interpolates the position embeddings as transformers does: bicubic, from the native grid to this one."""
        patches = self.patches(pixel_values)
        positions = nn.functional.interpolate(
            self.grid_positions, size=patches.shape[2:], mode="bicubic", align_corners=False
        )
        hidden = (patches + positions).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_position.expand(hidden.shape[0], 1, -1), hidden], dim=1)
        states = [self.pre_norm(hidden)]
        for layer in self.layers:
            output = layer(states[-1], attention_mask=None)
            states.append(output[0] if isinstance(output, tuple) else output)
        chosen = [states[index][:, self.first_token :] for index in self.feature_layers]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


class Projector(nn.Module):
    """[batch, tokens, layers * vision_hidden] to [batch, tokens, hidden]."""

    def __init__(self, checkpoint: VisionCheckpoint) -> None:
        super().__init__()
        weights = checkpoint.projector
        hidden, features = weights["linear_1.weight"].shape
        self.linear_1 = nn.Linear(features, hidden, bias="linear_1.bias" in weights)
        self.act = ACT2FN[checkpoint.projector_act]
        self.linear_2 = nn.Linear(hidden, weights["linear_2.weight"].shape[0], bias="linear_2.bias" in weights)
        load_weights(self, weights, "projector")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """A two-layer perceptron."""
        projected: torch.Tensor = self.linear_2(self.act(self.linear_1(features)))
        return projected


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], what: str) -> None:
    """Loads what the module needs; weights of layers that are not needed stay out."""
    expected = module.state_dict()
    missing = [name for name in expected if name not in weights and not name.startswith("post_layernorm")]
    wrong = [name for name in expected if name in weights and weights[name].shape != expected[name].shape]
    if missing or wrong:
        raise InvalidRequest(
            f"the {what}'s weights do not fit its configuration: missing {missing[:3]}, other shape {wrong[:3]}",
            reason="CHECKPOINT_CORRUPT",
        )
    module.load_state_dict({name: weights[name] for name in expected if name in weights}, strict=False)


def write_encoder(encoder: nn.Module, path: Path, patch_size: int) -> None:
    """Writes the encoder with dynamic batch, height and width (in whole patches)."""
    rows, columns = torch.export.Dim("rows", min=1, max=512), torch.export.Dim("columns", min=1, max=512)
    write_onnx(
        encoder,
        path,
        # Sizes unlike each other and unlike 1, or the exporter takes them for constants.
        {"pixel_values": torch.zeros(2, 3, 3 * patch_size, 4 * patch_size)},
        {"pixel_values": {0: torch.export.Dim("batch"), 2: patch_size * rows, 3: patch_size * columns}},
        "features",
    )


def write_projector(projector: nn.Module, path: Path, features: int) -> None:
    """Writes the projector with dynamic batch and token count."""
    write_onnx(
        projector,
        path,
        {"features": torch.zeros(2, 5, features)},
        {"features": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}},
        "image_features",
    )


def write_onnx(
    module: nn.Module, path: Path, example: dict[str, torch.Tensor], dynamic: dict[str, Any], output: str
) -> None:
    """Writes `path`, and `path`.data beside it if the weights are too large for one file."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            kwargs=example,
            input_names=list(example),
            output_names=[output],
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        forget_origin(program.model)
        program.save(path, external_data=size >= INLINE_LIMIT_BYTES)


def forget_origin(model: Any) -> None:
    """Drops the exporter's notes: they hold this machine's paths and make up a sixth of a small model's file."""
    model.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def check_onnx(path: Path, module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Returns torch's outputs after making sure that ONNX Runtime's equal them within TOLERANCE; else raises."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = []
    for value in inputs:
        with torch.no_grad():
            expected = module(value)
        actual = session.run(None, {name: value.numpy()})[0]
        if actual.shape != tuple(expected.shape):
            raise TriptychError(f"{path.name} gives {actual.shape}, torch {tuple(expected.shape)}")
        difference = relative_difference(actual, expected.numpy())
        if not difference <= TOLERANCE:
            raise TriptychError(f"{path.name} differs from torch by {difference:.1e} at input {tuple(value.shape)}")
        outputs.append(expected)
    return outputs


def relative_difference(actual: Any, expected: Any) -> float:
    """Returns the largest absolute difference over the largest expected magnitude."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the exporter's notes about its own internals away from the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
