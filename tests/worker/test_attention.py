"""Paged attention against dense attention in float64."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.model.attention import AttentionBatch, paged_attention, view_chunk, view_decodes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    kv_heads: int
    group: int
    head_dim: int
    decodes: tuple[int, ...]  # Context of each row, its own token included.
    chunks: tuple[tuple[int, int], ...]  # Cached prefix and length of each chunk.


LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 48]))
PREFIXES = st.one_of(st.just(0), LENGTHS)
LAYOUTS = st.builds(
    Layout,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 32]),
    decodes=st.lists(LENGTHS, max_size=4).map(tuple),
    chunks=st.lists(st.tuples(PREFIXES, LENGTHS), max_size=3).map(tuple),
).filter(lambda layout: bool(layout.decodes or layout.chunks))


def dense(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention in float64: queries [tokens, heads, dim] from `start` on, K and V [context, kv_heads, dim]."""
    group = queries.shape[1] // keys.shape[1]
    q, k, v = queries.double(), keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->htc", q, k) / q.shape[-1] ** 0.5
    future = torch.arange(len(k))[None, :] > start + torch.arange(len(q))[:, None]
    return torch.einsum("htc,chd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@settings(max_examples=80, deadline=None)
@given(
    layout=LAYOUTS, seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_paged_attention_equals_dense_attention(layout: Layout, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    contexts = [*layout.decodes, *(start + tokens for start, tokens in layout.chunks)]
    needed = [-(-context // BLOCK_TOKENS) for context in contexts]
    blocks = torch.randperm(sum(needed) + 2)  # Scattered, and two blocks that belong to nobody.
    tables = [table.tolist() for table in torch.split(blocks[: sum(needed)], needed)]
    shape = (len(blocks), BLOCK_TOKENS, layout.kv_heads, layout.head_dim)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    rows = len(layout.decodes) + sum(tokens for _, tokens in layout.chunks)
    queries = torch.randn(rows, layout.kv_heads * layout.group, layout.head_dim).to(dtype)

    rows_decoding = tables[: len(layout.decodes)]
    decodes = view_decodes(rows_decoding, layout.decodes, BLOCK_TOKENS, CPU) if layout.decodes else None
    chunks = []
    expected = []
    for row, (context, table) in enumerate(zip(layout.decodes, tables, strict=False)):
        k, v = keys[table].flatten(0, 1)[:context], values[table].flatten(0, 1)[:context]
        expected.append(dense(queries[row : row + 1], k, v, context - 1))
    row = len(layout.decodes)
    for (start, tokens), table in zip(layout.chunks, tables[row:], strict=True):
        chunks.append(view_chunk(row, start, tokens, torch.tensor(table)))
        k, v = keys[table].flatten(0, 1)[: start + tokens], values[table].flatten(0, 1)[: start + tokens]
        expected.append(dense(queries[row : row + tokens], k, v, start))
        row += tokens

    batch = AttentionBatch(torch.zeros(rows, dtype=torch.long), decodes, tuple(chunks))
    result = paged_attention(queries, keys, values, batch)
    assert result.dtype == dtype
    error = (result.double() - torch.cat(expected)).abs().max().item()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]


def test_decode_rows_of_very_different_lengths_do_not_see_the_padding() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(10, BLOCK_TOKENS, 1, 8), torch.randn(10, BLOCK_TOKENS, 1, 8)
    queries = torch.randn(2, 2, 8)
    view = view_decodes([[3], list(range(9))], [1, 140], BLOCK_TOKENS, CPU)
    result = paged_attention(queries, keys, values, AttentionBatch(torch.zeros(2), view, ()))
    assert torch.allclose(result[0], values[3, 0].expand(2, 8), atol=1e-6)
