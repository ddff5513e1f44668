"""A Llama-family decoder in dense fp64, one sequence at a time, without cache, blocks or batches."""

import math
from typing import Any

import torch
from torch import Tensor

from triptych.worker.model.config import DecoderConfig, RopeConfig
from triptych.worker.model.weights import DecoderWeights, LayerWeights


def shape_of(**overrides: Any) -> DecoderConfig:
    """A small decoder's shape."""
    return DecoderConfig(
        **{
            "layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "vocabulary": 75,
            "norm_epsilon": 1e-5,
            "context_tokens": 4096,
            "rope": RopeConfig(10000.0),
            "tied_head": False,
            "dtype": torch.float32,
            **overrides,
        }
    )


def random_weights(shape: DecoderConfig, seed: int, *, bias: bool) -> DecoderWeights:
    """Weights of about the scale that trained ones have."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(shape.hidden_size, generator=generator)

    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return DecoderWeights(
        embedding=torch.empty(0),
        layers=tuple(
            LayerWeights(
                norm(),
                matrix(width, shape.hidden_size),
                0.1 * torch.randn(width, generator=generator) if bias else None,
                matrix(shape.hidden_size, shape.heads * shape.head_dim),
                norm(),
                matrix(2 * shape.intermediate_size, shape.hidden_size),
                matrix(shape.hidden_size, shape.intermediate_size),
            )
            for _ in range(shape.layers)
        ),
        final_norm=norm(),
        head=matrix(shape.vocabulary, shape.hidden_size),
    )


def rotary_tables(shape: DecoderConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [positions, head_dim / 2], fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def dense_logits(
    shape: DecoderConfig, weights: DecoderWeights, rotary: tuple[Tensor, Tensor], embedded: Tensor, positions: Tensor
) -> Tensor:
    """Logits of every position of one sequence, [tokens, vocabulary], fp64."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon).sqrt() * weight.double()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = (table.double()[positions][:, None] for table in rotary)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    hidden = embedded.double()
    tokens, dim = hidden.shape[0], shape.head_dim
    masked = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    for layer in weights.layers:
        normed = norm(hidden, layer.attention_norm)
        projected = normed @ layer.qkv.double().T
        if layer.qkv_bias is not None:
            projected = projected + layer.qkv_bias.double()
        heads = projected.view(tokens, -1, dim)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        group = shape.heads // shape.kv_heads
        k, v = rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(masked, -torch.inf).softmax(-1), v)
        hidden = hidden + attended.flatten(1) @ layer.attention_output.double().T
        gate, up = (norm(hidden, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, -1)
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down.double().T
    return norm(hidden, weights.final_norm) @ weights.head.double().T
