"""A decoder step on CPU in one call of the C++ engine."""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from triptych.worker.cpu import library as native
from triptych.worker.cpu.build import KernelsUnavailable
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.low_rank import LowRankBasis
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.step import Segment, SequenceRows, StepResult
from triptych.worker.model.weights import DecoderWeights, LayerWeights

WeightFormat = Literal["fp32", "bf16", "int8"]
_FORMATS: dict[WeightFormat, int] = {"fp32": 0, "bf16": 1, "int8": 2}
_FORMAT_BYTES: dict[WeightFormat, int] = {"fp32": 4, "bf16": 2, "int8": 1}
_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuDecoder:
    """A Llama-family decoder in C++: weights packed for streaming, threads of its own, buffers that are kept.

    Only one thread at a time may use it; waiting for a step releases the interpreter lock. Idle threads sleep after
    some tens of microseconds. The tensors of the cache are used in place, so they must not be resized.
    """

    input_dtype = torch.float32

    def __init__(
        self,
        shape: DecoderConfig,
        weights: DecoderWeights,
        rotary: tuple[Tensor, Tensor],
        cache_keys: Sequence[Tensor],
        cache_values: Sequence[Tensor],
        weight_format: WeightFormat,
        threads: int | None = None,
        *,
        isa: str | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """Packs the weights.

        Args:
            shape: The decoder's shape; `head_dim` must be a multiple of 16, up to 128, or 256.
            weights: Matrices [out, in] of any floating type.
            rotary: Cosines and sines, each with [positions, head_dim / 2] elements.
            cache_keys: Per layer, [blocks, 16, kv_heads, head_dim]: float32, bfloat16 or float16, contiguous.
            cache_values: The same.
            weight_format: How weights are kept. With bf16 and int8, activations are rounded to bfloat16 in front of
                matrix products where the processor multiplies bfloat16 itself, and nowhere else.
            threads: How many; torch.get_num_threads() by default.
            isa: Use this instruction set and no better one; $TRIPTYCH_CPU_ISA or the best one by default.
            library: A library to use instead of the usual one.

        Raises KernelsUnavailable where the engine does not work or does not support the shape.
        """
        self._library = library or native.library()
        self._handle = None
        self.bytes_per_weight = _FORMAT_BYTES[weight_format]
        self._running: tuple[object, ...] = ()
        cosines, sines = (table.detach().float().contiguous().flatten() for table in rotary)
        if shape.head_dim % 16 or not (shape.head_dim <= 128 or shape.head_dim == 256):
            raise KernelsUnavailable(f"head_dim {shape.head_dim} is not a multiple of 16 up to 128, or 256")
        self._shape = shape
        self._caches: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self._check_cache(shape, cache_keys, cache_values)
        self._vocabulary, self._hidden = shape.vocabulary, shape.hidden_size
        best = self._library.triptych_best_isa()
        wanted = isa or os.environ.get("TRIPTYCH_CPU_ISA")
        if wanted is not None and wanted not in native.ISAS:
            raise KernelsUnavailable(f"instruction set {wanted!r} is none of {', '.join(native.ISAS)}")
        level = best if wanted is None else native.ISAS.index(wanted)
        if level > best and library is None:
            raise KernelsUnavailable(f"this processor does not have {wanted}")
        handle = self._library.triptych_create(
            ctypes.byref(
                native.Shape(
                    shape.layers,
                    shape.hidden_size,
                    shape.intermediate_size,
                    shape.heads,
                    shape.kv_heads,
                    shape.head_dim,
                    shape.vocabulary,
                    cosines.numel() // (shape.head_dim // 2),
                    shape.norm_epsilon,
                )
            ),
            _FORMATS[weight_format],
            level,
            threads or torch.get_num_threads(),
        )
        if not handle:
            raise KernelsUnavailable(self._error())
        self._handle = handle
        self._check(self._library.triptych_set_rotary(handle, cosines.data_ptr(), sines.data_ptr()))
        for layer in weights.layers:
            self._add_layer(layer)
        final_norm, head = _plain(weights.final_norm), _plain(weights.head)
        self._check(self._library.triptych_set_head(handle, final_norm.data_ptr(), head.data_ptr()))
        self._add_cache(cache_keys, cache_values)
        self._rank = shape.head_dim

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.triptych_destroy(self._handle)
            self._handle = None

    def add_host_cache(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Adds the cache that segments with `host` are in; its tensors must be like the first's and not be resized."""
        self._check_cache(self._shape, keys, values)
        if keys[0].dtype != self._caches[0][0][0].dtype or len(self._caches) > 1:
            raise ValueError("the host cache must have the first one's type, and there can be only one")
        self._add_cache(keys, values)

    def set_basis(self, basis: LowRankBasis) -> None:
        """Sets the principal components that segments with `origins` are made of."""
        tensors = [_plain(t) for t in (basis.keys, basis.key_means, basis.values, basis.value_means)]
        self._check(self._library.triptych_set_basis(self._handle, *(t.data_ptr() for t in tensors), basis.rank))
        self._rank = basis.rank

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return native.ISAS[self._library.triptych_isa(self._handle)]

    @property
    def weight_bytes(self) -> int:
        """How many bytes of weights one step reads at least, the output projection included."""
        return int(self._library.triptych_weight_bytes(self._handle))

    def start(
        self,
        embedded: Tensor,
        sequences: Sequence[SequenceRows],
        *,
        positions: Tensor | None = None,
        logits: bool = True,
        greedy: bool = False,
    ) -> Callable[[], StepResult]:
        """Begins a step in the decoder's own threads, after the one before has ended; see `StepBackend`.

        In the last layer, only rows with logits and each sequence's last row are computed.

        Args:
            embedded: Token embeddings and features, [tokens, hidden]: the sequences' rows, one after another.
            sequences: Which rows are whose.
            positions: Positions for the rotary embedding, [tokens], int32; by default the places in the sequences.
            logits: Whether to return logits.
            greedy: Whether to return the most likely tokens.

        Raises ValueError if the input does not fit; the cache is unchanged then.
        """
        if embedded.dim() != 2 or embedded.shape[1] != self._hidden:
            raise ValueError(f"embedded must be [tokens, {self._hidden}], not {list(embedded.shape)}")
        embedded = embedded.float().contiguous()
        rows: list[int] = []
        tables: list[int] = []
        segments: list[native.Segment] = []
        wanted = 0
        for index, sequence in enumerate(sequences):
            blocks = -(-sequence.context // BLOCK_TOKENS)
            if len(sequence.blocks) < blocks:
                raise ValueError(f"{len(sequence.blocks)} blocks do not cover a context of {sequence.context}")
            rows += (sequence.rows, sequence.context, sequence.logits, len(tables))
            tables += sequence.blocks[:blocks]
            wanted += sequence.logits
            if sequence.segment is not None:
                segments.append(self._describe(index, sequence.segment, len(tables)))
                tables += sequence.segment.blocks
        if positions is None and any(sequence.skipped for sequence in sequences):
            positions = torch.cat([_positions(sequence) for sequence in sequences])
        if positions is not None:
            if positions.numel() != embedded.shape[0]:
                raise ValueError(f"{positions.numel()} positions do not fit {embedded.shape[0]} rows")
            positions = positions.to(torch.int32).contiguous()
        described = torch.tensor(rows, dtype=torch.int32)
        table = torch.tensor(tables, dtype=torch.int32)
        beside = (native.Segment * len(segments))(*segments)
        result = StepResult(
            torch.empty(wanted, self._vocabulary) if logits else None,
            torch.empty(wanted, dtype=torch.int32) if greedy else None,
            torch.empty(len(sequences), dtype=torch.bool),
        )
        given = native.StepInput(
            embedded.data_ptr(),
            embedded.shape[0],
            described.data_ptr(),
            len(sequences),
            table.data_ptr(),
            None if positions is None else positions.data_ptr(),
            ctypes.addressof(beside),
            len(segments),
        )
        taken = native.StepOutput(
            None if result.logits is None else result.logits.data_ptr(),
            None if result.greedy is None else result.greedy.data_ptr(),
            result.finite.data_ptr(),
        )
        if self._library.triptych_start_step(self._handle, ctypes.byref(given), ctypes.byref(taken)):
            raise ValueError(self._error())
        # What the step reads and writes must outlive it, whether or not anybody waits for it.
        self._running = (embedded, described, table, positions, result, beside, tuple(sequences))

        def finish() -> StepResult:
            self._library.triptych_await_step(self._handle)
            return result

        return finish

    def _describe(self, index: int, segment: Segment, table: int) -> native.Segment:
        """Checks a segment's sizes, which the engine cannot see."""
        rank = self._rank if segment.origins is not None else self._shape.head_dim
        blocks = -(-segment.tokens * rank // (BLOCK_TOKENS * self._shape.head_dim))
        padded = -(-segment.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        if len(segment.blocks) < blocks:
            raise ValueError(f"{len(segment.blocks)} blocks do not hold a segment of {segment.tokens} tokens")
        for tensor, dtype, size in (
            (segment.origins, torch.int32, segment.tokens),
            (segment.bias, torch.float32, self._shape.layers * padded),
        ):
            if tensor is not None and not (
                tensor.dtype == dtype and tensor.numel() == size and tensor.is_contiguous() and not tensor.is_cuda
            ):
                raise ValueError("a segment's origins and bias must be on the CPU, contiguous, int32 and float32")
        pointers = (None if t is None else t.data_ptr() for t in (segment.origins, segment.bias))
        return native.Segment(index, int(segment.host), segment.tokens, table, *pointers)

    def _add_cache(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        pointers = [(ctypes.c_void_p * len(keys))(*(t.data_ptr() for t in tensors)) for tensors in (keys, values)]
        blocks, cache_type = keys[0].shape[0], _CACHE_TYPES[keys[0].dtype]
        self._check(self._library.triptych_add_cache(self._handle, *pointers, blocks, cache_type))
        self._caches.append((tuple(keys), tuple(values)))

    def _add_layer(self, layer: LayerWeights) -> None:
        names = ("attention_norm", "qkv", "qkv_bias", "attention_output", "mlp_norm", "gate_up", "down")
        tensors = [None if (t := getattr(layer, name)) is None else _plain(t) for name in names]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._check(self._library.triptych_add_layer(self._handle, ctypes.byref(native.LayerTensors(*pointers))))

    @staticmethod
    def _check_cache(shape: DecoderConfig, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if len(keys) != shape.layers or len(values) != shape.layers:
            raise ValueError(f"the cache must have {shape.layers} layers")
        expected = (keys[0].shape[0], BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        for tensor in (*keys, *values):
            if tuple(tensor.shape) != expected or not tensor.is_contiguous() or tensor.dtype != keys[0].dtype:
                raise ValueError(f"every layer's cache must be contiguous, of one type and {list(expected)}")
        if keys[0].dtype not in _CACHE_TYPES or keys[0].device.type != "cpu":
            raise KernelsUnavailable(f"a cache of {keys[0].dtype} on {keys[0].device} is not supported")

    def _check(self, failed: int) -> None:
        if failed:
            raise KernelsUnavailable(self._error())

    def _error(self) -> str:
        return str(self._library.triptych_last_error().decode(errors="replace"))


def _positions(rows: SequenceRows) -> Tensor:
    end = rows.context + rows.skipped
    return torch.arange(end - rows.rows, end, dtype=torch.int32)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()
