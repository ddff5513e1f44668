"""The KV cache's tensors. Which block belongs to whom is `blocks.BlockPool`'s business."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.model.config import DecoderConfig


def block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the size of one block over all layers, keys and values, in bytes."""
    return 2 * config.layers * BLOCK_TOKENS * config.kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of every block.

    Attributes:
        keys: Per layer, [blocks, BLOCK_TOKENS, kv_heads, head_dim]. Always finite, written or not: attention
            multiplies positions it masks by zero.
        values: The same.
    """

    def __init__(self, config: DecoderConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (blocks, BLOCK_TOKENS, config.kv_heads, config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] at `slots` [tokens], block * BLOCK_TOKENS + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks, so that numbers that are not finite never outlive the request that caused them."""
        ids = torch.tensor(blocks, dtype=torch.long, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[ids] = 0
