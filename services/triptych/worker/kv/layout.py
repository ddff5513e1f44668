"""How the bytes of one block are laid out, and whose they are: what every tier below the device agrees on."""

import hashlib
import json
from dataclasses import asdict, dataclass

import torch

from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and owner of a block's bytes: [2 * layers, block_tokens, kv_heads, head_dim], layer 0's keys, its values, …

    Attributes:
        layers: Decoder layers.
        block_tokens: Positions in a block.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        dtype: Element type, as torch names it.
        fingerprint: Hex digest of all that decides the numbers: weights, their format, and what computes them.
    """

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    fingerprint: str

    @classmethod
    def of(cls, config: DecoderConfig, dtype: torch.dtype, fingerprint: str) -> "BlockLayout":
        """Returns the layout of a decoder's cache."""
        name = str(dtype).removeprefix("torch.")
        return cls(config.layers, BLOCK_TOKENS, config.kv_heads, config.head_dim, name, fingerprint)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one block."""
        return 2 * self.layers, self.block_tokens, self.kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Size of one block, in bytes."""
        layers, tokens, heads, dim = self.shape
        return layers * tokens * heads * dim * self.torch_dtype.itemsize

    @property
    def digest(self) -> str:
        """Short name of layout and owner, hex: blocks with different ones are never mixed up."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]
