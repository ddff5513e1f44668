"""What the decoder needs to know about a checkpoint, typed, from its Hugging Face config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

# Text models whose layers are: RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU.
SUPPORTED_TEXT_MODELS = ("llama", "mistral", "qwen2")


class UnsupportedCheckpoint(ValueError):
    """The checkpoint cannot be served; the message says which setting of its config.json is the reason."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the geometric series of wavelengths.
        kind: `default`, `linear` or `llama3`, as in Hugging Face's `rope_type`.
        factor: How much further than trained the context reaches; 1 for `default`.
        low_frequency_factor: Only `llama3`: wavelengths above original_context / this are stretched by `factor`.
        high_frequency_factor: Only `llama3`: wavelengths below original_context / this stay as they are.
        original_context: Only `llama3`: trained context, in tokens.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of the decoder.

    Attributes:
        layers: Number of decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Width of one head.
        vocabulary: Rows of the embedding.
        norm_epsilon: Added to the variance in RMSNorm.
        context_tokens: Most positions the checkpoint was made for.
        rope: Position embedding.
        tied_head: The output projection is the embedding.
        dtype: Element type the checkpoint names.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_epsilon: float
    context_tokens: int
    rope: RopeConfig
    tied_head: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint as the worker sees it.

    Attributes:
        decoder: The language model.
        image_token_id: Token that stands for one visual position; None for a text-only checkpoint.
        end_token_ids: Tokens that end a generation.
    """

    decoder: DecoderConfig
    image_token_id: int | None
    end_token_ids: frozenset[int]


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a checkpoint folder.

    Defaults that config.json leaves out are Hugging Face's. Raises UnsupportedCheckpoint, and FileNotFoundError when
    the folder has no config.json.
    """
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(f"{model_dir} holds no config.json: not a Hugging Face checkpoint folder")
    config = AutoConfig.from_pretrained(model_dir)
    text = config.get_text_config()
    if config.model_type not in ("llava", *SUPPORTED_TEXT_MODELS):
        raise UnsupportedCheckpoint(
            f"model_type {config.model_type!r} is not supported; use a LLaVA-format checkpoint (model_type 'llava')"
        )
    return ModelConfig(
        decoder=_decoder_config(text, text.dtype or config.dtype, tied_head=bool(config.tie_word_embeddings)),
        image_token_id=_image_token_id(config),
        end_token_ids=_end_token_ids(model_dir, text),
    )


def _decoder_config(text: Any, dtype: torch.dtype | None, *, tied_head: bool) -> DecoderConfig:
    if text.model_type not in SUPPORTED_TEXT_MODELS:
        raise UnsupportedCheckpoint(
            f"text_config.model_type {text.model_type!r} is not supported; one of {', '.join(SUPPORTED_TEXT_MODELS)} is"
        )
    if text.hidden_act != "silu":
        raise UnsupportedCheckpoint(f"text_config.hidden_act {text.hidden_act!r} is not supported; 'silu' is")
    if getattr(text, "mlp_bias", False) or getattr(text, "attention_bias", False):
        raise UnsupportedCheckpoint("text_config.mlp_bias and attention_bias are not supported")
    if getattr(text, "use_sliding_window", text.model_type == "mistral") and getattr(text, "sliding_window", None):
        raise UnsupportedCheckpoint("text_config.sliding_window is not supported")
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    if heads % kv_heads:
        raise UnsupportedCheckpoint(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    return DecoderConfig(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        norm_epsilon=text.rms_norm_eps,
        context_tokens=text.max_position_embeddings,
        rope=_rope_config(text.rope_parameters),
        tied_head=tied_head,
        dtype=dtype or torch.float32,
    )


def _rope_config(parameters: dict[str, Any]) -> RopeConfig:
    kind = parameters["rope_type"]
    theta = float(parameters["rope_theta"])
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpoint("rope_parameters.partial_rotary_factor is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=float(parameters["factor"]),
            low_frequency_factor=float(parameters["low_freq_factor"]),
            high_frequency_factor=float(parameters["high_freq_factor"]),
            original_context=int(parameters["original_max_position_embeddings"]),
        )
    raise UnsupportedCheckpoint(f"rope_type {kind!r} is not supported; default, linear and llama3 are")


def _image_token_id(config: Any) -> int | None:
    for name in ("image_token_index", "image_token_id"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return None


def _end_token_ids(model_dir: Path, text: Any) -> frozenset[int]:
    generation = model_dir / "generation_config.json"
    named = json.loads(generation.read_text("utf-8")).get("eos_token_id") if generation.is_file() else None
    if named is None:
        named = text.eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named) if isinstance(named, list) else frozenset((int(named),))
