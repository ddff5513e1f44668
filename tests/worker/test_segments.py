"""Attention over keys in several places is attention over all of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.cpu.dense import random_weights, shape_of
from triptych.worker.cpu.build import KernelsUnavailable
from triptych.worker.cpu.decoder import CpuDecoder
from triptych.worker.cpu.library import library
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.low_rank import Fit, LowRankBasis, decode, encode
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.decoder import Decoder
from triptych.worker.model.rotary import Rotary, rotate
from triptych.worker.model.segments import attend_part, join_parts
from triptych.worker.model.step import Segment, SequenceRows, StepBackend
from triptych.worker.model.torch_backend import TorchBackend

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_parts_joined_by_log_sum_exp_are_dense_attention(sizes: list[int], spread: float, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    queries = spread * torch.randn(4, 8, generator=dice, dtype=torch.float64)
    keys, values = (torch.randn(sum(sizes), 2, 8, generator=dice, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(sum(sizes), generator=dice, dtype=torch.float64)
    parts = [
        attend_part(queries, k, v, b)
        for k, v, b in zip(*(torch.split(tensor, sizes) for tensor in (keys, values, bias)), strict=True)
    ]
    wide_keys, wide_values = (tensor.repeat_interleave(2, 1) for tensor in (keys, values))
    scores = torch.einsum("hd,thd->ht", queries, wide_keys) / 8**0.5 + bias
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), wide_values)
    assert torch.allclose(join_parts(parts), expected, rtol=1e-10, atol=1e-12)


def test_a_bias_of_log_n_counts_a_key_n_times() -> None:
    dice = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 8, generator=dice)
    keys, values = (torch.randn(5, 2, 8, generator=dice) for _ in range(2))
    counts = torch.tensor([1, 3, 1, 2, 1])
    expected, _ = attend_part(queries, keys.repeat_interleave(counts, 0), values.repeat_interleave(counts, 0))
    output, _ = attend_part(queries, keys, values, counts.log())
    assert torch.allclose(output, expected, atol=1e-6)


# Whole steps, in C++ and in torch


class World:
    """One sequence whose positions 16 to 16 + aside * 16 lie outside its block table, and the same one whole."""

    def __init__(self, backend: str, shape: DecoderConfig, dtype: torch.dtype, ratio: int) -> None:
        self.shape, self.ratio = shape, ratio
        self.cache, self.host = (KVCache(shape, 40, CPU, dtype) for _ in range(2))
        weights = random_weights(shape, 0, bias=False)
        dice = torch.Generator().manual_seed(1)
        size = (shape.layers, shape.kv_heads, shape.head_dim)
        directions = [torch.linalg.qr(torch.randn(*size, shape.head_dim, generator=dice)).Q for _ in range(2)]
        means = [torch.randn(size, generator=dice) for _ in range(2)]
        self.basis = LowRankBasis(directions[0], means[0], directions[1], means[1])
        self.basis = self.basis.truncated(shape.head_dim // ratio)
        self.rotary = Rotary(shape.rope, shape.head_dim, shape.context_tokens, CPU, torch.float32)
        self.backend: StepBackend
        if backend == "native":
            tables = (self.rotary.cosines, self.rotary.sines)
            self.backend = decoder = CpuDecoder(
                shape, weights, tables, self.cache.keys, self.cache.values, "fp32", threads=2
            )
            decoder.add_host_cache(self.host.keys, self.host.values)
            decoder.set_basis(self.basis)
        else:
            weights = replace(weights, embedding=torch.empty(0, dtype=torch.float32))
            self.backend = TorchBackend(Decoder(shape, weights), self.cache, self.host, self.basis)

    def logits(self, embedded: Tensor, *sequences: SequenceRows) -> Tensor:
        result = self.backend.start(embedded, sequences)()
        assert result.logits is not None
        assert result.finite.all()
        return result.logits


def world(backend: str, dtype: torch.dtype = torch.float32, ratio: int = 4, head_dim: int = 32) -> World:
    if backend == "native":
        try:
            library()
        except KernelsUnavailable as error:
            pytest.skip(str(error))
    return World(backend, shape_of(head_dim=head_dim, hidden_size=4 * head_dim, layers=3), dtype, ratio)


TABLE = list(range(3, 17))
ASIDE = range(1, 10)
"""Places of `TABLE` whose blocks are set aside: positions 16 to 160."""


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("kind", "head_dim", "ratio"),
    [
        *((kind, head_dim, 4) for kind in ("host", "merged") for head_dim in (16, 128)),
        *(("low rank", head_dim, ratio) for head_dim, ratio in ((16, 4), (32, 2), (32, 8), (128, 4), (256, 4))),
    ],
)
def test_a_row_beside_a_segment_computes_what_it_would_with_all_keys_in_its_table(
    backend: str, kind: str, head_dim: int, ratio: int
) -> None:
    w = world(backend, ratio=ratio, head_dim=head_dim)
    shape = w.shape
    dice = torch.Generator().manual_seed(3)
    rows = torch.randn(203, shape.hidden_size, generator=dice)
    w.logits(rows[:200], SequenceRows(200, 200, 1, TABLE))
    ids = [TABLE[place] for place in ASIDE]
    removed = len(ids) * BLOCK_TOKENS
    if kind == "host":
        taken = [30, 7, 2, 9, 11, 39, 0, 1, 20]
        for to, from_ in ((w.host.keys, w.cache.keys), (w.host.values, w.cache.values)):
            for layer in range(shape.layers):
                to[layer][taken] = from_[layer][ids]
        segment = Segment(taken, removed, host=True)
    elif kind == "merged":
        # Every key twice, so that half of them with a bias of log 2 stand for all.
        bias = torch.zeros(shape.layers, removed // 2)
        bias[:] = torch.tensor(2.0).log()
        taken = [20, 30, 22, 25, 31][: -(-removed // 2 // BLOCK_TOKENS)]
        for tensors in (w.cache.keys, w.cache.values):
            for tensor in tensors:
                half = tensor[ids].flatten(0, 1)[::2].clone()
                tensor[ids] = half.repeat_interleave(2, 0).view(len(ids), BLOCK_TOKENS, *half.shape[1:])
                padded = torch.zeros(len(taken) * BLOCK_TOKENS, *half.shape[1:])
                padded[: len(half)] = half
                tensor[taken] = padded.view(len(taken), BLOCK_TOKENS, *half.shape[1:])
        width = len(taken) * BLOCK_TOKENS
        padded_bias = torch.zeros(shape.layers, width)
        padded_bias[:, : removed // 2] = bias
        segment = Segment(taken, removed // 2, bias=padded_bias)
    else:
        origins = torch.arange(16, 16 + removed)
        angles = w.rotary.at(origins)
        taken = [20, 30, 22, 25, 31][: -(-len(ids) // ratio)]
        for kind_of, tensors in (("keys", w.cache.keys), ("values", w.cache.values)):
            for layer, tensor in enumerate(tensors):
                vectors = getattr(w.basis, kind_of)[layer]
                mean = getattr(w.basis, kind_of.removesuffix("s") + "_means")[layer]
                exact = tensor[ids].flatten(0, 1)
                plain = rotate(exact, angles[0], -angles[1]) if kind_of == "keys" else exact
                coefficients = encode(plain, vectors, mean)
                back = decode(coefficients, vectors, mean)
                back = rotate(back, *angles) if kind_of == "keys" else back
                tensor[ids] = back.view(len(ids), BLOCK_TOKENS, *back.shape[1:])
                flat = torch.zeros(len(taken) * tensor[0].numel())
                flat[: coefficients.numel()] = coefficients.flatten()
                tensor[taken] = flat.view(len(taken), *tensor.shape[1:])
        segment = Segment(taken, removed, origins=origins.int())
    whole = w.logits(rows[200:201], SequenceRows(1, 201, 1, TABLE))
    rest = [block for place, block in enumerate(TABLE) if place not in ASIDE]
    beside = SequenceRows(1, 201 - removed, 1, rest, removed, segment)
    apart = w.logits(rows[200:201], beside)
    assert (apart - whole).abs().max() < 1e-4 * whole.abs().max()
    # In one step with others, in any order of decodes, nobody changes, and rows without a segment not by a bit.
    other = SequenceRows(1, 3, 1, [38])
    alone = w.logits(rows[201:202], other)
    mixed = w.logits(torch.cat((rows[201:202], rows[200:201], rows[201:202])), other, beside, other)
    if backend == "native":
        assert torch.equal(mixed[0], alone[0])
        assert torch.equal(mixed[2], alone[0])
        assert torch.equal(mixed[1], apart[0])
    assert torch.allclose(mixed, torch.cat((alone, apart, alone)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_components_in_half_precision_expand_alike_in_both_backends(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(5)
    both = [world("native", dtype), world("torch", dtype)]
    # The same numbers in every block of both caches.
    for w in both:
        dice.manual_seed(6)
        for tensor in (*w.cache.keys, *w.cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=dice))
    row = torch.randn(1, both[0].shape.hidden_size, generator=dice)
    beside = SequenceRows(1, 21, 1, [1, 2], 160, Segment([4, 5, 6], 160, origins=torch.arange(16, 176).int()))
    got = []
    for w in both:
        if isinstance(w.backend, TorchBackend):  # Its own keys in float32: only the segment is compared.
            w.cache.keys = [tensor.float() for tensor in w.cache.keys]
            w.cache.values = [tensor.float() for tensor in w.cache.values]
        got.append(w.logits(row, beside))
    assert (got[0] - got[1]).abs().max() < 2e-2 * got[0].abs().max()


def test_a_segment_that_does_not_fit_is_refused() -> None:
    w = world("native")
    row = torch.zeros(1, w.shape.hidden_size)
    origins = torch.arange(16).int()
    for segment in (
        Segment([40], 16),
        Segment([-1], 16),
        Segment([1], 17),
        Segment([1], 0),
        Segment([1], 16, origins=origins[:15]),
        Segment([1], 16, origins=origins + w.shape.context_tokens),
        Segment([1], 16, origins=origins.long()),
        Segment([1], 16, bias=torch.zeros(2, 16)),
    ):
        with pytest.raises(ValueError):
            w.backend.start(row, [SequenceRows(1, 1, 1, [0], 16, segment)])
    with pytest.raises(ValueError):
        w.backend.start(torch.cat((row, row)), [SequenceRows(2, 2, 1, [0], 16, Segment([1], 16))])


# Principal components


def test_components_fitted_to_a_subspace_lose_nothing_of_it() -> None:
    dice = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(2, 3, 16, 16, generator=dice)).Q[:, :, :4]
    fit = Fit(2)
    rows = [torch.einsum("thr,hrd->thd", torch.randn(50, 3, 4, generator=dice), part) + 3 for part in directions]
    for layer, part in enumerate(rows):
        fit.add(layer, part[:30], 2 * part[:30])
        fit.add(layer, part[30:], 2 * part[30:])
    basis = fit.basis()
    small = basis.truncated(4)
    for part, vectors, mean in zip(rows, small.keys, small.key_means, strict=True):
        assert torch.allclose(decode(encode(part, vectors, mean), vectors, mean), part, atol=1e-4)
    whole = decode(encode(rows[0], basis.values[0], basis.value_means[0]), basis.values[0], basis.value_means[0])
    assert torch.allclose(whole, rows[0], atol=1e-4)
