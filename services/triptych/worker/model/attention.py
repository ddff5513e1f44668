"""Attention over a paged KV cache: decodes in one batch, prefill chunks one by one, each with its cached prefix."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych.worker.model.segments import SegmentedRow


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Rows that attend with one query each.

    Attributes:
        tables: Block ids, [rows, blocks]; rows shorter than the longest are padded with any valid id.
        mask: True where a cached position belongs to the row, [rows, 1, 1, blocks * block_tokens].
    """

    tables: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Consecutive positions of one sequence.

    Attributes:
        first_row: Where the chunk begins among the step's tokens.
        tokens: Its length.
        table: Block ids of the sequence up to the chunk's end, [blocks].
        context: Positions up to the chunk's end, cached prefix included.
        mask: True where a query may look, [tokens, context]; None when the chunk starts the sequence (plain causal).
    """

    first_row: int
    tokens: int
    table: Tensor
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the step's tokens stand. Rows are ordered: all decodes, then the chunks.

    Attributes:
        slots: For each token, block id * block_tokens + offset: where its key and value go, [tokens].
        decodes: The decode rows, or None.
        chunks: The prefill chunks.
        beside: Decode rows that attend to more than their block table; `paged_attention` leaves that out.
    """

    slots: Tensor
    decodes: DecodeView | None
    chunks: tuple[ChunkView, ...]
    beside: tuple[SegmentedRow, ...] = ()


def view_decodes(
    tables: Sequence[Sequence[int]], contexts: Sequence[int], block_tokens: int, device: torch.device
) -> DecodeView:
    """Describes decode rows by their block tables and their context lengths, the new token included."""
    width = max(-(-context // block_tokens) for context in contexts)
    padded = torch.tensor([[*table[:width], *[0] * (width - len(table))] for table in tables])
    mask = torch.arange(width * block_tokens) < torch.tensor(contexts)[:, None]
    return DecodeView(padded.to(device), mask[:, None, None, :].to(device))


def view_chunk(first_row: int, start: int, tokens: int, table: Tensor) -> ChunkView:
    """Describes a chunk of `tokens` positions from `start` on; `table` [blocks] covers at least its end."""
    context = start + tokens
    mask = torch.ones(tokens, context, dtype=torch.bool, device=table.device).tril(start) if start else None
    return ChunkView(first_row, tokens, table, context, mask)


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
    """Computes softmax(q k^T / sqrt(head_dim)) v for every token of a step.

    Args:
        queries: [tokens, heads, head_dim].
        keys: One layer's cache, [blocks, block_tokens, kv_heads, head_dim]; holds the step's own keys already.
        values: The same shape. Every element must be finite, also where nothing was written yet: masked positions
            have weight zero, and zero times NaN is NaN.
        batch: Which rows are what.

    Returns:
        [tokens, heads, head_dim].
    """
    output = torch.empty_like(queries)
    if batch.decodes is not None:
        rows = batch.decodes.tables.shape[0]
        output[:rows] = _attend_decodes(queries[:rows], keys, values, batch.decodes)
    for chunk in batch.chunks:
        rows_of_chunk = slice(chunk.first_row, chunk.first_row + chunk.tokens)
        output[rows_of_chunk] = _attend_chunk(queries[rows_of_chunk], keys, values, chunk)
    return output


def _attend_decodes(queries: Tensor, keys: Tensor, values: Tensor, view: DecodeView) -> Tensor:
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    # A group's heads are laid out as query rows, so that they share one read of K and V.
    grouped = queries.view(rows, kv_heads, heads // kv_heads, head_dim)
    k = keys[view.tables].view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    v = values[view.tables].view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    return scaled_dot_product_attention(grouped, k, v, attn_mask=view.mask).reshape(rows, heads, head_dim)


def _attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, view: ChunkView) -> Tensor:
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    # Batch is kv_heads and heads are the group's, with K and V expanded (stride 0) instead of repeated.
    q = queries.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k = _gather(keys, view).expand(kv_heads, group, view.context, head_dim)
    v = _gather(values, view).expand(kv_heads, group, view.context, head_dim)
    attended = scaled_dot_product_attention(q, k, v, attn_mask=view.mask, is_causal=view.mask is None)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def _gather(cache: Tensor, view: ChunkView) -> Tensor:
    """Returns a sequence's rows of the cache as [kv_heads, 1, context, head_dim]."""
    return cache[view.table].flatten(0, 1)[: view.context].permute(1, 0, 2).unsqueeze(1)
