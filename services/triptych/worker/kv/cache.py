"""The KV cache's tensors. Which block belongs to whom is `blocks.BlockPool`'s business."""

from collections.abc import Sequence
from typing import Any

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
        block_bytes: Size of one block over all layers, in bytes.
    """

    def __init__(
        self, config: DecoderConfig, blocks: int, device: torch.device, dtype: torch.dtype, *, pinned: bool = False
    ) -> None:
        """`pinned`: in host memory that CUDA can copy from and to by itself."""
        self.block_bytes = block_bytes(config, dtype)
        shape = (blocks, BLOCK_TOKENS, config.kv_heads, config.head_dim)
        options: dict[str, Any] = {"device": device, "dtype": dtype, "pin_memory": pinned}
        self.keys = [torch.zeros(shape, **options) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, **options) for _ in range(config.layers)]
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] at `slots` [tokens], block * BLOCK_TOKENS + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks, so that numbers that are not finite never outlive the request that caused them."""
        ids = torch.tensor(blocks, dtype=torch.long, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[ids] = 0

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Returns copies of blocks, [blocks, 2 * layers, BLOCK_TOKENS, kv_heads, head_dim], in host memory.

        The blocks may be read while a step computes others; on CUDA, the copy runs beside the step's kernels.
        """
        device = self.keys[0].device
        with torch.no_grad(), torch.cuda.stream(self._beside):
            ids = torch.tensor(blocks, dtype=torch.long, device=device)
            rows = torch.stack([tensor[ids] for pair in zip(self.keys, self.values, strict=True) for tensor in pair], 1)
            return rows.cpu()

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Overwrites blocks with `rows`, as `gather` returned them."""
        device = self.keys[0].device
        with torch.no_grad():
            ids = torch.tensor(blocks, dtype=torch.long, device=device)
            rows = rows.to(device, non_blocking=True)
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
                keys.index_copy_(0, ids, rows[:, 2 * layer])
                values.index_copy_(0, ids, rows[:, 2 * layer + 1])

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` positions of a block to another one."""
        with torch.no_grad():
            for tensor in (*self.keys, *self.values):
                tensor[target, :tokens] = tensor[source, :tokens]
