"""Takes visual KV out of the block tables of running sequences, into host memory or into fewer blocks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import IntegrityError, InvalidRequest
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.cache import KVCache, block_bytes
from triptych.worker.kv.identity import BLOCK_TOKENS, VisualSpan
from triptych.worker.kv.low_rank import LowRankBasis, encode
from triptych.worker.kv.merging import merge_tokens
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.rotary import Rotary, rotate
from triptych.worker.model.step import Segment

_LAYERS_TOGETHER = 8
"""Layers whose tokens are merged at the same time: more cost memory, fewer cost calls."""


@dataclass(frozen=True, slots=True)
class Aside:
    """Visual KV of one running sequence that is no longer in its block table. Nobody else ever uses it.

    Attributes:
        policy: Why it is not.
        segment: What the sequence attends to instead; holds one reference to each of its blocks.
        pool: Which these blocks are of.
        removed: How many blocks the table lost.
        saved_bytes: Device memory that is free for others because of it.
    """

    policy: VisualKvPolicy
    segment: Segment
    pool: BlockPool
    removed: int
    saved_bytes: int

    @property
    def device_blocks(self) -> Sequence[int]:
        """Blocks of the device pool it holds."""
        return () if self.segment.host else self.segment.blocks

    def release(self) -> None:
        """Gives back its blocks."""
        self.pool.release(self.segment.blocks)


def visual_blocks(spans: Sequence[VisualSpan]) -> list[range]:
    """Returns, per image, which places of a block table are all its own; an image's edges share blocks with text."""
    runs = (range(blocks_for(span.start), span.end // BLOCK_TOKENS) for span in spans)
    return [run for run in runs if run]


class VisualKv:
    """Applies the policies to the tensors, and keeps the books of the host memory they use.

    Only whole blocks of an image move. Attributes:
        ratio: How many times smaller compressed visual KV is.
        host_pool: Blocks in host memory; those of no sequence are free.
    """

    def __init__(
        self,
        config: DecoderConfig,
        cache: KVCache,
        pool: BlockPool,
        host: KVCache | None = None,
        basis: LowRankBasis | None = None,
        ratio: int = 4,
    ) -> None:
        """`basis` has `head_dim / ratio` directions, or is None when nothing was fitted for the checkpoint."""
        self.ratio = ratio
        self.host_pool = BlockPool(len(host.keys[0]) if host else 0)
        self._cache = cache
        self._pool = pool
        self._host = host
        self._device = cache.keys[0].device
        self._basis = basis.to(self._device) if basis else None
        self._rotary = Rotary(config.rope, config.head_dim, config.context_tokens, self._device, torch.float32)
        self._block_bytes = block_bytes(config, cache.keys[0].dtype)
        self._largest = torch.finfo(cache.keys[0].dtype).max

    def check(self, policy: VisualKvPolicy) -> None:
        """Raises InvalidRequest (VISUAL_KV_UNAVAILABLE) when this worker cannot follow a policy."""
        if policy is VisualKvPolicy.OFFLOAD and not self.host_pool.size:
            raise _unavailable(policy, "the worker's offload_kv_bytes holds no block")
        if policy is VisualKvPolicy.LOW_RANK and self._basis is None:
            raise _unavailable(policy, "nothing was fitted for this checkpoint; run `triptych compress`")

    @torch.inference_mode()
    def set_aside(self, table: list[int], spans: Sequence[VisualSpan], policy: VisualKvPolicy) -> Aside | None:
        """Takes the visual blocks out of a table whose spans are all computed, gives them back and returns the rest.

        Returns None, and changes nothing, where there is nothing to gain or no room for it now.
        """
        runs = visual_blocks(spans) if policy is not VisualKvPolicy.EXACT else []
        places = [place for run in runs for place in run]
        if not places:
            return None
        blocks = [table[place] for place in places]
        offload = policy is VisualKvPolicy.OFFLOAD
        segment = self._offload(blocks) if offload else self._compress(blocks, runs, policy)
        if segment is None:
            return None
        gone = set(places)
        table[:] = [block for place, block in enumerate(table) if place not in gone]
        pool, kept = (self.host_pool, 0) if segment.host else (self._pool, len(segment.blocks))
        return Aside(policy, segment, pool, len(blocks), (len(blocks) - kept) * self._block_bytes)

    def wipe(self, aside: Aside) -> None:
        """Zeroes what was set aside: numbers that are not finite never outlive their request."""
        cache = self._host if aside.segment.host else self._cache
        if cache is not None:
            cache.wipe(aside.segment.blocks)

    def check_integrity(self, asides: Iterable[Aside]) -> None:
        """Raises IntegrityError unless exactly what `asides` hold of the host memory is held, once each."""
        self.host_pool.check_integrity()
        held = Counter(block for aside in asides if aside.segment.host for block in aside.segment.blocks)
        if any(self.host_pool.references(block) != held[block] for block in range(self.host_pool.size)):
            raise IntegrityError("references to blocks in host memory and the sequences that run differ")

    def _offload(self, blocks: list[int]) -> Segment | None:
        if self._host is None or len(blocks) > self.host_pool.available:
            return None
        taken = [self.host_pool.allocate() for _ in blocks]
        for to, from_ in ((self._host.keys, self._cache.keys), (self._host.values, self._cache.values)):
            for layer, tensor in enumerate(from_):
                to[layer][taken] = tensor[blocks].to("cpu")
        self._pool.release(blocks)
        return Segment(taken, len(blocks) * BLOCK_TOKENS, host=True)

    def _compress(self, blocks: list[int], runs: list[range], policy: VisualKvPolicy) -> Segment | None:
        needed = self._compressed_blocks(runs, policy)
        freed = sum(self._pool.references(block) == 1 for block in blocks)
        if needed >= len(blocks) or needed > self._pool.available + freed:
            return None
        if policy is VisualKvPolicy.LOW_RANK:
            rows, segment = self._project(blocks, runs)
        else:
            rows, segment = self._merge(blocks, runs)
        self._pool.release(blocks)
        taken = [self._pool.allocate(visual=True) for _ in range(needed)]
        for tensors, layers in zip((self._cache.keys, self._cache.values), rows, strict=True):
            for tensor, row in zip(tensors, layers, strict=True):
                # A row past its type's range would be infinite, and attention multiplies whatever it masks.
                flat = tensor.new_zeros(needed * tensor[0].numel())
                flat[: row.numel()] = row.flatten().clamp(-self._largest, self._largest)
                tensor[taken] = flat.view(needed, *tensor.shape[1:])
        return segment._replace(blocks=taken)

    def _compressed_blocks(self, runs: list[range], policy: VisualKvPolicy) -> int:
        if policy is VisualKvPolicy.LOW_RANK:
            return -(-sum(map(len, runs)) // self.ratio)
        return blocks_for(sum(self._merged(run) for run in runs))

    def _merged(self, run: range) -> int:
        return -(-len(run) * BLOCK_TOKENS // self.ratio)

    def _read(self, tensor: Tensor, blocks: list[int]) -> Tensor:
        return tensor[blocks].flatten(0, 1).float()

    def _project(self, blocks: list[int], runs: list[range]) -> tuple[list[list[Tensor]], Segment]:
        """Returns coefficients of keys and of values per layer, and what they are, without blocks."""
        basis = self._basis
        assert basis is not None  # `check` refused the request otherwise.
        origins = torch.cat([torch.arange(run.start * BLOCK_TOKENS, run.stop * BLOCK_TOKENS) for run in runs])
        cosines, sines = self._rotary.at(origins.to(self._device))
        keys = [
            encode(rotate(self._read(tensor, blocks), cosines, -sines), basis.keys[layer], basis.key_means[layer])
            for layer, tensor in enumerate(self._cache.keys)
        ]
        values = [
            encode(self._read(tensor, blocks), basis.values[layer], basis.value_means[layer])
            for layer, tensor in enumerate(self._cache.values)
        ]
        return [keys, values], Segment((), len(origins), origins=origins.int())

    def _merge(self, blocks: list[int], runs: list[range]) -> tuple[list[list[Tensor]], Segment]:
        """Returns merged keys and values per layer, and what they are, without blocks."""
        targets = [self._merged(run) for run in runs]
        tokens = sum(targets)
        bias = torch.zeros(len(self._cache.keys), blocks_for(tokens) * BLOCK_TOKENS)
        rows: list[list[Tensor]] = [[], []]
        sizes = [len(run) * BLOCK_TOKENS for run in runs]
        for first in range(0, len(self._cache.keys), _LAYERS_TOGETHER):
            layers = slice(first, first + _LAYERS_TOGETHER)
            keys, values = (
                torch.split(torch.stack([self._read(tensor, blocks) for tensor in tensors[layers]]), sizes, 1)
                for tensors in (self._cache.keys, self._cache.values)
            )
            merged = [merge_tokens(*parts) for parts in zip(keys, values, targets, strict=True)]
            for kind in (0, 1):
                rows[kind] += torch.cat([part[kind] for part in merged], 1)
            bias[layers, :tokens] = torch.cat([part[2] for part in merged], 1).log().cpu()
        return rows, Segment((), tokens, bias=bias)


def _unavailable(policy: VisualKvPolicy, why: str) -> InvalidRequest:
    return InvalidRequest(f"visual KV policy {policy.value} is not available: {why}", reason="VISUAL_KV_UNAVAILABLE")
