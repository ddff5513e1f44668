"""What the machine could do at best, measured the same moment as what it does."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from triptych.worker.cpu import library as native
from triptych.worker.cpu.build import KernelsUnavailable
from triptych.worker.model.config import DecoderConfig

_READ_BYTES = 256 << 20
_ROWS = 1024


class Bandwidth:
    """Bytes per second of a plain read of memory that no cache holds, with as many threads as the decoder has."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._data = torch.ones(_READ_BYTES // 4)

    def measure(self) -> float:
        """Reads once, in order. Through the C++ engine's read loop, or torch's sum where there is none."""
        try:
            return _READ_BYTES / native.read_seconds(self._data, self._threads)
        except KernelsUnavailable:
            begin = time.perf_counter()
            self._data.sum()
            return _READ_BYTES / (time.perf_counter() - begin)


class ProductRate:
    """FLOP per second of torch's matrix products at a decoder's own shapes and 1,024 rows.

    In float32 or bfloat16, whichever is faster here, whatever the decoder computes in: on processors without bfloat16
    arithmetic, torch's bfloat16 product is hundreds of times slower than what the machine can do.

    Attributes:
        dtype: The faster type.
    """

    def __init__(self, config: DecoderConfig) -> None:
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = ((width, hidden), (hidden, config.heads * config.head_dim), (2 * inner, hidden), (hidden, inner))
        self._flops = sum(2 * _ROWS * n * k for n, k in shapes)
        narrow, wide = (_seconds(_factors(shapes, _ROWS // 16, dtype)) for dtype in (torch.bfloat16, torch.float32))
        self.dtype = torch.bfloat16 if narrow < wide else torch.float32
        self._factors = _factors(shapes, _ROWS, self.dtype)

    def measure(self) -> float:
        """Multiplies all four shapes a few times."""
        return self._flops / _seconds(self._factors)


def _factors(shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, k, dtype=dtype), torch.randn(n, k, dtype=dtype)) for n, k in shapes]


@torch.inference_mode()
def _seconds(factors: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The best of three."""
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for x, w in factors:
            linear(x, w)
        best = min(best, time.perf_counter() - begin)
    return best


def weight_bytes(config: DecoderConfig, bytes_per_weight: float) -> float:
    """What a decode step must read of the weights: all matrices once, the output projection included."""
    return bytes_per_weight * (_matrix_weights(config) + config.vocabulary * config.hidden_size)


def kv_bytes(config: DecoderConfig, tokens: int, dtype: torch.dtype) -> int:
    """What a decode step must read of the cache for `tokens` positions."""
    return tokens * config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize


def prefill_flops(config: DecoderConfig, tokens: int) -> float:
    """Work that a causal prefill must do: all products, half of the attention square, one row of logits.

    Of the last layer, rows other than the last one need only keys and values.
    """
    attention = 4 * config.heads * config.head_dim * (tokens + 1) / 2
    per_layer = 2 * _matrix_weights(config) / config.layers + attention
    last = 2 * config.hidden_size * 2 * config.kv_heads * config.head_dim
    return tokens * ((config.layers - 1) * per_layer + last) + 2 * config.hidden_size * config.vocabulary


def _matrix_weights(config: DecoderConfig) -> int:
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return config.layers * config.hidden_size * (attention + 3 * config.intermediate_size)
