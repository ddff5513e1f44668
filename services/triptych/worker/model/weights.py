"""Decoder weights from safetensors, with the projections that are always used together fused into one matrix."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from triptych.worker.model.config import DecoderConfig, UnsupportedCheckpoint

# Where the decoder sits: (prefix of the body, name of the output projection). Hub LLaVA checkpoints use the first
# spelling, transformers 5 may write the second, a bare language model the third.
_SPELLINGS = (
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("model.", "lm_head.weight"),
)

# Files up to this size are hashed whole; of larger ones, this many bytes in evenly spaced pages.
_WHOLE_FILE_BYTES = 64 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in].

    Attributes:
        attention_norm: [hidden].
        qkv: [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values.
        qkv_bias: [(heads + 2 * kv_heads) * head_dim], or None where the model has none.
        attention_output: [hidden, heads * head_dim].
        mlp_norm: [hidden].
        gate_up: [2 * intermediate, hidden]: gate, then up.
        down: [hidden, intermediate].
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of the decoder.

    Attributes:
        embedding: [vocabulary, hidden].
        layers: The layers, first to last.
        final_norm: [hidden].
        head: [vocabulary, hidden]; the same tensor as `embedding` when tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def load_decoder_weights(
    model_dir: Path, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Reads the decoder, and only the decoder, of a checkpoint folder.

    Raises FileNotFoundError when there are no safetensors, UnsupportedCheckpoint when tensors are missing or have
    other shapes than config.json says.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(model_dir):
            handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            files |= dict.fromkeys(handle.keys(), handle)
        prefix, head_name = _spelling(files)

        def read(name: str, *shape: int) -> Tensor:
            if name not in files:
                raise UnsupportedCheckpoint(f"{model_dir} has no tensor {name}")
            tensor: Tensor = files[name].get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise UnsupportedCheckpoint(f"{name} is {list(tensor.shape)}, config.json makes it {list(shape)}")
            return tensor.to(device, dtype)

        hidden = config.hidden_size
        embedding = read(f"{prefix}embed_tokens.weight", config.vocabulary, hidden)
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(
                _read_layer(f"{prefix}layers.{layer}.", config, read, has_bias=f"{prefix}{_Q_BIAS}" in files)
                for layer in range(config.layers)
            ),
            final_norm=read(f"{prefix}norm.weight", hidden),
            head=embedding if config.tied_head else read(head_name, config.vocabulary, hidden),
        )


_Q_BIAS = "layers.0.self_attn.q_proj.bias"


def _read_layer(prefix: str, config: DecoderConfig, read: Callable[..., Tensor], *, has_bias: bool) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return LayerWeights(
        attention_norm=read(f"{prefix}input_layernorm.weight", hidden),
        qkv=torch.cat([read(f"{attention}{name}_proj.weight", rows[name], hidden) for name in "qkv"]),
        qkv_bias=torch.cat([read(f"{attention}{name}_proj.bias", rows[name]) for name in "qkv"]) if has_bias else None,
        attention_output=read(f"{attention}o_proj.weight", hidden, rows["q"]),
        mlp_norm=read(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([read(f"{mlp}{name}_proj.weight", intermediate, hidden) for name in ("gate", "up")]),
        down=read(f"{mlp}down_proj.weight", hidden, intermediate),
    )


def fingerprint(model_dir: Path) -> str:
    """Returns a SHA-256, in hex, that changes with configuration or weights: KV of one is never used by another.

    Hashes config.json and every weight file: its name, its size and its content. Headers alone would not do, as a
    retrained checkpoint has the same ones. Of files above 64 MiB, 64 MiB in evenly spaced pages stand for the
    content, so that start-up does not read 14 GB: training moves practically every weight, so it cannot be missed;
    an edit of a few single weights by hand can.
    """
    digest = hashlib.sha256()
    for path in (model_dir / "config.json", *_weight_files(model_dir)):
        size = path.stat().st_size
        digest.update(f"{len(path.name)}:{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            pages = _WHOLE_FILE_BYTES // _PAGE_BYTES
            for page in range(pages):
                file.seek(page * (size - _PAGE_BYTES) // (pages - 1))
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        return [model_dir / name for name in names]
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{model_dir} has neither model.safetensors nor model.safetensors.index.json")
    return [single]


def _spelling(names: dict[str, Any]) -> tuple[str, str]:
    for prefix, head in _SPELLINGS:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix, head
    raise UnsupportedCheckpoint(
        "no decoder found: none of " + ", ".join(f"{prefix}embed_tokens.weight" for prefix, _ in _SPELLINGS)
    )
