"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864), in Hugging Face's half-split layout."""

import math

import torch
from torch import Tensor

from triptych.worker.model.config import RopeConfig


def inverse_wavelengths(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair of features, radians, [head_dim / 2], float32.

    `linear` divides positions by the factor (kaiokendev); `llama3` divides only long wavelengths, with a linear
    blend between the two bounds, as in Meta's Llama 3.1 reference code.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    blend = ((rope.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class Rotary:
    """Precomputed angles for every position of the context.

    Attributes:
        cosines: [context, 1, head_dim / 2].
        sines: The same shape.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, context_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        positions = torch.arange(context_tokens, dtype=torch.float32)
        angles = (positions[:, None] * inverse_wavelengths(rope, head_dim))[:, None, :]
        self.cosines = angles.cos().to(device, dtype)
        self.sines = angles.sin().to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines for `positions` [tokens], each [tokens, 1, head_dim / 2]."""
        return self.cosines[positions], self.sines[positions]


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates `x` [tokens, heads, head_dim] by angles [tokens, 1, head_dim / 2]; features pair across the halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
