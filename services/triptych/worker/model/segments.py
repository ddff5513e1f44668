"""Attention over keys that lie in several places, joined by log-sum-exp; in torch.

softmax over all keys is the mean of the softmaxes over parts, weighted by each part's sum of exponentials (Milakov and
Gimelshein, arXiv:1805.02867).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.low_rank import LowRankBasis, decode
from triptych.worker.model.rotary import Rotary, rotate
from triptych.worker.model.step import Segment, SequenceRows


def attend_part(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns attention of one position over some keys, and the logarithm of its sum of exponentials.

    Args:
        queries: [heads, head_dim].
        keys: [tokens, kv_heads, head_dim].
        values: The same shape.
        bias: Added to the scores, [tokens].

    Returns:
        [heads, head_dim] and [heads], of the queries' type, at least float32.
    """
    heads, head_dim = queries.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(dtype).view(keys.shape[1], -1, head_dim)
    scores = torch.einsum("hgd,thd->hgt", grouped, keys.to(dtype)) * head_dim**-0.5
    if bias is not None:
        scores = scores + bias
    output = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values.to(dtype))
    return output.reshape(heads, head_dim), scores.logsumexp(-1).flatten()


def join_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns attention over all keys together [heads, head_dim], from what `attend_part` gives of disjoint parts."""
    outputs, sums = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    return (outputs * sums.softmax(0)[..., None]).sum(0)


class Segments:
    """Reads segments, wherever they are."""

    def __init__(self, cache: KVCache, host: KVCache | None, basis: LowRankBasis | None, rotary: Rotary) -> None:
        """`rotary` is in float32."""
        self._cache = cache
        self._host = host
        self._device = cache.keys[0].device
        self._basis = None if basis is None else basis.to(self._device)
        self._rotary = rotary

    def views(self, sequences: Sequence[SequenceRows]) -> tuple["SegmentedRow", ...]:
        """Describes the rows that have a segment; each stands where its sequence does."""
        found = []
        for row, rows in enumerate(sequences):
            if rows.segment is None:
                continue
            if rows.rows != 1:
                raise ValueError("a sequence with a segment takes one row")
            table = torch.tensor(rows.blocks[: -(-rows.context // BLOCK_TOKENS)], device=self._device)
            where = torch.device("cpu") if rows.segment.host else self._device
            blocks = torch.tensor(rows.segment.blocks, device=where)
            found.append(SegmentedRow(self, row, table, rows.context, rows.segment, blocks))
        return tuple(found)

    def near(self, layer: int, view: "SegmentedRow") -> tuple[Tensor, Tensor]:
        """Returns keys and values [context, kv_heads, head_dim] of a row's block table."""
        keys, values = (
            tensors[layer][view.table].flatten(0, 1)[: view.context]
            for tensors in (self._cache.keys, self._cache.values)
        )
        return keys, values

    def beside(self, layer: int, view: "SegmentedRow") -> tuple[Tensor, Tensor]:
        """Returns keys and values [tokens, kv_heads, head_dim] of a row's segment, where they are."""
        segment = view.segment
        cache = self._host if segment.host else self._cache
        if cache is None:
            raise ValueError("a segment is in host memory, but there is no cache in it")
        keys, values = (tensors[layer][view.blocks] for tensors in (cache.keys, cache.values))
        if segment.origins is None:
            return keys.flatten(0, 1)[: segment.tokens], values.flatten(0, 1)[: segment.tokens]
        basis = self._basis
        if basis is None:
            raise ValueError("a segment holds principal components, but there is no basis")
        shape = (-1, keys.shape[2], basis.rank)
        coefficients = (tensor.reshape(shape)[: segment.tokens].float() for tensor in (keys, values))
        expanded = decode(next(coefficients), basis.keys[layer], basis.key_means[layer])
        angles = (table.float() for table in self._rotary.at(segment.origins.long().to(keys.device)))
        return rotate(expanded, *angles), decode(next(coefficients), basis.values[layer], basis.value_means[layer])


@dataclass(frozen=True, slots=True)
class SegmentedRow:
    """A row that attends to keys in two places.

    Attributes:
        reader: Reads them.
        row: Which of the step's.
        table: Its block ids, [blocks].
        context: Positions in these blocks, its own included.
        segment: The other keys.
        blocks: The segment's block ids, [blocks], where its cache is.
    """

    reader: Segments
    row: int
    table: Tensor
    context: int
    segment: Segment
    blocks: Tensor

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """Returns attention [heads, head_dim] over block table and segment.

        What is in host memory is computed on the CPU: the query goes there and the result comes back, not the keys.
        """
        near = attend_part(query, *self.reader.near(layer, self))
        keys, values = self.reader.beside(layer, self)
        bias = self.segment.bias
        if bias is not None:
            bias = bias[layer, : self.segment.tokens].to(keys.device)
        output, total = attend_part(query.to(keys.device), keys, values, bias)
        return join_parts([near, (output.to(query.device), total.to(query.device))]).to(query.dtype)
