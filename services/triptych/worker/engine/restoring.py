"""Brings cached KV back to the device for sequences that are about to run."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from triptych.worker.engine.sequence import Sequence
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.fetching import Fetch
from triptych.worker.kv.hierarchy import Hierarchy
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity

# How many of the first waiting sequences have their KV fetched.
_WINDOW = 8
# How often one sequence's KV may be fetched anew because the device lost what stood before it.
_MOST_FETCHES = 3


@dataclass(slots=True)
class Loading:
    """A sequence's KV on its way up.

    Attributes:
        fetch: What is on its way.
        start: The block of the chain at which it begins.
        deadline_s: When to stop waiting for it, on the monotonic clock.
    """

    fetch: Fetch
    start: int
    deadline_s: float

    @property
    def is_awaited(self) -> bool:
        """Whether something may still come in time."""
        return not self.fetch.done and time.monotonic() < self.deadline_s


class Restorer:
    """Fetches KV for the sequences next in turn, and puts it into the device's pool right before they are planned.

    There it is like any other cached KV, so planning does not know where it came from. Only the engine's thread calls.
    """

    def __init__(self, pool: BlockPool, hierarchy: Hierarchy, timeout_s: float) -> None:
        self._pool, self._hierarchy, self._timeout_s = pool, hierarchy, timeout_s
        self._loading: dict[Sequence, Loading] = {}
        self._settled: dict[Sequence, tuple[int, int]] = {}  # Blocks on the device after the latest fetch; fetches.

    @property
    def fetches(self) -> list[Fetch]:
        """What is on its way."""
        return [loading.fetch for loading in self._loading.values()]

    def covered(self, sequence: Sequence) -> int:
        """Returns how many leading positions device and tiers together should hold of a sequence."""
        chain = sequence.chain.reusable()
        known = len(self._pool.match(chain))
        known += self._hierarchy.covers(chain[known:])
        parts = [part.tokens for part in sequence.chain.parts(known) if self._has(part)]
        return known * BLOCK_TOKENS + max(parts, default=0)

    def is_loading(self, sequence: Sequence) -> bool:
        """Tells whether a sequence should not be planned yet."""
        loading = self._loading.get(sequence)
        return loading is not None and loading.is_awaited

    def tend(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Starts fetches for the first waiting sequences, and puts onto the device what has come for them.

        Returns the sequences that need KV which cannot be computed, and for which nothing more will come.
        """
        first = list(islice(waiting, _WINDOW))
        for sequence in (*first, *(one for one in list(self._loading) if one not in first)):
            loading = self._loading.get(sequence) or self._start(sequence)
            if loading is not None and not loading.is_awaited:
                self._land(sequence, loading)
                if sequence.needs and sequence not in self._loading:
                    self._start(sequence)  # What the device held of it may have gone meanwhile.
        return [one for one in dict.fromkeys((*first, *self._settled)) if one.needs and one not in self._loading]

    def begin(self, sequence: Sequence) -> None:
        """Starts a sequence's fetch at once, because it needs what comes."""
        self._start(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Ends what is under way for a sequence."""
        self._end(sequence)
        self._settled.pop(sequence, None)

    def _start(self, sequence: Sequence) -> Loading | None:
        chain = sequence.chain.reusable()
        device = self._pool.match(chain)
        start = len(device)
        settled, fetches = self._settled.get(sequence, (-1, 0))
        if start >= settled >= 0 or fetches >= _MOST_FETCHES or sequence.holds_part:
            return None
        is_near = all(map(self._hierarchy.host.contains, chain[start : start + 1]))
        if is_near and not self._has_room(sequence, device, 0):
            return None  # It will be there at once when its turn comes.
        parts = {index - start: sequence.chain.parts(index) for index in sequence.chain.part_indices if index >= start}
        fetch = self._hierarchy.fetch(chain[start:], parts, at_any_cost=sequence.needs > 0)
        if fetch.done and not fetch.held():
            self._hierarchy.close_fetch(fetch)
            self._settled[sequence] = start, fetches
            return None
        self._settled[sequence] = start, fetches + (not fetch.done)
        self._loading[sequence] = loading = Loading(fetch, start, time.monotonic() + self._timeout_s)
        return loading

    def _has_room(self, sequence: Sequence, device: tuple[int, ...], new: int) -> bool:
        """Tells whether the pool can take a whole sequence, or, where it must come first, `new` of its blocks."""
        revived = sum(self._pool.references(block) == 0 for block in device)
        needed = new if sequence.needs else blocks_for(len(sequence.token_ids)) - len(device)
        return needed + revived <= self._pool.available

    def _land(self, sequence: Sequence, loading: Loading) -> None:
        """Copies what has come to blocks of the device, once there is room for the whole sequence."""
        chain = sequence.chain.reusable()
        device = self._pool.match(chain)
        held = loading.fetch.held()
        full = [pair for pair in held if pair[0].tokens == BLOCK_TOKENS]
        new = full[len(device) - loading.start :]
        if len(device) <= loading.start + len(full):
            new += held[len(full) :]
        if len(device) < loading.start or not new:
            # The device lost what stood before; or it has all by now, or nothing came.
            self._settle(sequence, len(device) + (len(device) < loading.start))
            return
        if not self._has_room(sequence, device, len(new)):
            return
        for block in device:
            self._pool.acquire(block)
        blocks = [self._pool.allocate(identity.is_visual) for identity, _ in new]
        self._hierarchy.restore([(*pair, block) for pair, block in zip(new, blocks, strict=True)])
        for (identity, _), block in zip(new, blocks, strict=True):
            self._pool.identify(block, identity)
        self._pool.release([*device, *blocks])
        self._settle(sequence, len(self._pool.match(chain)))

    def _settle(self, sequence: Sequence, blocks: int) -> None:
        """Ends a fetch, and starts another one only when the device holds fewer than `blocks` blocks later."""
        self._settled[sequence] = blocks, self._settled[sequence][1]
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        loading = self._loading.pop(sequence, None)
        if loading is not None:
            self._hierarchy.close_fetch(loading.fetch)

    def _has(self, identity: BlockIdentity) -> bool:
        return bool(self._pool.match((identity,))) or self._hierarchy.covers((identity,)) > 0
