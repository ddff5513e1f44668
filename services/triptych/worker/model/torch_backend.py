"""Decoder steps in plain torch: on CUDA, and on CPU where the C++ engine cannot be built."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.low_rank import LowRankBasis
from triptych.worker.model.attention import AttentionBatch, ChunkView, view_chunk, view_decodes
from triptych.worker.model.decoder import Decoder
from triptych.worker.model.rotary import Rotary
from triptych.worker.model.segments import Segments
from triptych.worker.model.step import SequenceRows, StepResult


class TorchBackend:
    """A decoder and the cache's tensors."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, host: KVCache | None = None, basis: LowRankBasis | None = None
    ) -> None:
        """`host` and `basis` are what segments in host memory, or of principal components, are in."""
        self.input_dtype = decoder.weights.embedding.dtype
        self._decoder = decoder
        self._cache = cache
        config, device = decoder.config, cache.keys[0].device
        rotary = Rotary(config.rope, config.head_dim, config.context_tokens, device, torch.float32)
        self._segments = Segments(cache, host, basis, rotary)

    def start(
        self, embedded: Tensor, sequences: Sequence[SequenceRows], *, logits: bool = True, greedy: bool = False
    ) -> Callable[[], StepResult]:
        """Begins a step; see `StepBackend`. On CUDA it runs by itself; on CPU it has ended when this returns."""
        result = self._step(embedded, sequences, logits=logits, greedy=greedy)
        return lambda: result

    @torch.inference_mode()
    def _step(self, embedded: Tensor, sequences: Sequence[SequenceRows], *, logits: bool, greedy: bool) -> StepResult:
        """Single rows are computed together and must come first."""
        positions, batch = _describe(sequences, embedded.device)
        if any(sequence.segment is not None for sequence in sequences):
            batch = replace(batch, beside=self._segments.views(sequences))
        hidden = self._decoder.forward(embedded, positions, batch, self._cache)
        ends: list[int] = []
        wanted: list[int] = []
        row = 0
        for sequence in sequences:
            row += sequence.rows
            ends.append(row - 1)
            wanted += range(row - sequence.logits, row)
        # The last row of each sequence attends to all it has: if anything before is not finite, neither is that row.
        finite = hidden[torch.tensor(ends, device=hidden.device)].isfinite().all(dim=-1)
        if not wanted:
            return StepResult(None, None, finite)
        computed = self._decoder.logits(hidden[torch.tensor(wanted, device=hidden.device)])
        return StepResult(computed if logits else None, computed.argmax(dim=-1) if greedy else None, finite)


def _describe(sequences: Sequence[SequenceRows], device: torch.device) -> tuple[Tensor, AttentionBatch]:
    """Returns each row's position, and how the rows attend."""
    singles = 0
    while singles < len(sequences) and sequences[singles].rows == 1:
        singles += 1
    slots: list[Tensor] = []
    positions = [sequence.context + sequence.skipped - 1 for sequence in sequences[:singles]]
    decodes = None
    if singles:
        tables = [sequence.blocks for sequence in sequences[:singles]]
        contexts = [sequence.context for sequence in sequences[:singles]]
        decodes = view_decodes(tables, contexts, BLOCK_TOKENS, device)
        last = [
            table[(n - 1) // BLOCK_TOKENS] * BLOCK_TOKENS + (n - 1) % BLOCK_TOKENS
            for table, n in zip(tables, contexts, strict=True)
        ]
        slots.append(torch.tensor(last, device=device))
    chunks: list[ChunkView] = []
    row = singles
    for sequence in sequences[singles:]:
        start = sequence.context - sequence.rows
        table = torch.tensor(sequence.blocks[: -(-sequence.context // BLOCK_TOKENS)], device=device)
        places = torch.arange(start, sequence.context, device=device)
        slots.append(table[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS)
        chunks.append(view_chunk(row, start, sequence.rows, table))
        positions += range(start + sequence.skipped, sequence.context + sequence.skipped)
        row += sequence.rows
    return torch.tensor(positions, device=device), AttentionBatch(torch.cat(slots), decodes, tuple(chunks))
