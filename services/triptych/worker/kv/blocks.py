"""Who holds which block of the KV cache on the device, and which blocks can be reused."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.errors import IntegrityError
from triptych.worker.kv.eviction import SecondChance
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity


def blocks_for(tokens: int) -> int:
    """Returns how many blocks `tokens` positions take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class PoolShares:
    """How text and visual KV divide the pool, as shares of it.

    Attributes:
        text: Cached text is not evicted for visual KV as long as text holds no more than this.
        visual: The same the other way round. What neither claims is shared, and what is unused may be borrowed.
        reserve: Requests that run may not hold more of one kind than leaves this for the other.
    """

    text: float = 0.5
    visual: float = 0.3
    reserve: float = 0.1


class PoolWatcher(Protocol):
    """Learns what happens to blocks that can be reused."""

    def identified(self, block: int, identity: BlockIdentity) -> None:
        """A block can be found by an identity now; its positions of that identity never change again."""

    def leaving(self, block: int, identities: Sequence[BlockIdentity]) -> None:
        """A block is about to be given to somebody else; its bytes are still there until this returns."""

    def forgotten(self, block: int) -> None:
        """A block cannot be found any more; its bytes must not be used any further."""


class BlockPool:
    """Fixed-size pool of KV blocks with reference counts.

    A block is free, owned (at least one reference) or cached (no reference, and reachable by an identity). When no free
    one is left, cached blocks are evicted: of the kind that holds more than its share, and there the longest
    unreferenced, with a second chance for what was hit more than once. A block may have several identities: one of its
    whole content, and one for each image that ends within it. Not thread-safe: only the engine's thread calls it.

    Attributes:
        size: How many blocks there are.
        evictions: Cached blocks given to somebody else, by whether they are visual.
        hits: Blocks reused, by whether they are visual.
    """

    def __init__(self, size: int, shares: PoolShares | None = None, watcher: PoolWatcher | None = None) -> None:
        shares = shares or PoolShares()
        self.size = size
        self.evictions = {False: 0, True: 0}
        self.hits = {False: 0, True: 0}
        self._watcher = watcher
        self._claims = {False: int(shares.text * size), True: int(shares.visual * size)}
        self._reserve = int(shares.reserve * size)
        self._references = [0] * size
        self._visual = [False] * size
        self._hits = [0] * size
        self._released_at = [0] * size
        self._clock = 0
        self._identities: list[list[BlockIdentity]] = [[] for _ in range(size)]
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._cached: dict[bool, SecondChance[int]] = {False: SecondChance(), True: SecondChance()}
        self._owned = {False: 0, True: 0}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out: free and cached ones."""
        return len(self._free) + self.cached

    @property
    def owned(self) -> int:
        """Blocks with at least one reference."""
        return self.size - self.available

    @property
    def cached(self) -> int:
        """Unreferenced blocks kept for reuse."""
        return len(self._cached[False]) + len(self._cached[True])

    def held(self, visual: bool) -> int:
        """Returns how many blocks of a kind are owned or cached."""
        return self._owned[visual] + len(self._cached[visual])

    def references(self, block: int) -> int:
        """Returns how many holders a block has."""
        return self._references[block]

    def is_identified(self, block: int) -> bool:
        """Tells whether a block can be found by an identity."""
        return bool(self._identities[block])

    def leaves_reserve(self, visual: bool, blocks: int) -> bool:
        """Tells whether requests may own `blocks` more of a kind without touching what is reserved for the other."""
        return not blocks or self._owned[visual] + blocks <= self.size - self._reserve

    def match(self, chain: Iterable[BlockIdentity]) -> tuple[int, ...]:
        """Returns the blocks that hold the longest known start of a chain. Takes no reference."""
        found: list[int] = []
        for identity in chain:
            block = self._by_key.get(identity.key)
            if block is None or identity not in self._identities[block]:
                break
            found.append(block)
        return tuple(found)

    def allocate(self, visual: bool = False) -> int:
        """Returns a block with one reference and no identity, evicting a cached one if none is free.

        Raises IntegrityError when nothing is available: the scheduler plans within `available`.
        """
        block = self._free.pop() if self._free else self._evict(visual)
        self._references[block] = 1
        self._visual[block] = visual
        self._owned[visual] += 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference to an owned or cached block, which counts as a hit."""
        visual = self._visual[block]
        if self._references[block] == 0:
            if block not in self._cached[visual]:
                raise IntegrityError(f"KV block {block} was acquired while free")
            self._hits[block] = self._cached[visual].remove(block)
            self._owned[visual] += 1
        self._hits[block] += 1
        self.hits[visual] += 1
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one reference from each block of a table, last first: a chain's tail is evicted before its head."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise IntegrityError(f"KV block {block} was released while unreferenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._owned[self._visual[block]] -= 1
                if self._identities[block]:
                    self._clock += 1
                    self._released_at[block] = self._clock
                    self._cached[self._visual[block]].add(block, self._hits[block])
                else:
                    self._free.append(block)

    def identify(self, block: int, identity: BlockIdentity) -> None:
        """Makes an owned block reachable by an identity; does nothing if another block already is."""
        if self._references[block] == 0 or any(known.tokens == identity.tokens for known in self._identities[block]):
            raise IntegrityError(f"KV block {block} was identified while unreferenced or twice")
        if identity.key not in self._by_key:
            self._by_key[identity.key] = block
            self._identities[block].append(identity)
            if self._watcher is not None:
                self._watcher.identified(block, identity)

    def forget(self, blocks: Sequence[int]) -> None:
        """Makes owned blocks unreachable."""
        for block in blocks:
            self._forget(block)
            if self._watcher is not None:
                self._watcher.forgotten(block)

    def drop(self, doomed: Callable[[BlockIdentity], bool] = lambda identity: True) -> int:
        """Makes blocks of which an identity is doomed unreachable, and frees those that nobody holds.

        Returns how many blocks.
        """
        blocks = list({block for block in self._by_key.values() if any(map(doomed, self._identities[block]))})
        self.forget(blocks)
        for block in blocks:
            if self._references[block] == 0:
                self._cached[self._visual[block]].remove(block)
                self._free.append(block)
        return len(blocks)

    def identities(self) -> list[tuple[BlockIdentity, ...]]:
        """Returns the identities of every block that has any."""
        return [tuple(identities) for identities in self._identities if identities]

    def oldest_cached(self) -> Iterable[tuple[int, Sequence[BlockIdentity]]]:
        """Yields cached blocks with their identities; of each kind the next to be evicted first."""
        for visual in (True, False):
            for block in self._cached[visual]:
                yield block, self._identities[block]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free + owned + cached is the size and no identity leads to a free block."""
        free, cached = set(self._free), {*self._cached[False], *self._cached[True]}
        owned = {block for block, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free) or free & cached or (free | cached) & owned:
            raise IntegrityError("a KV block is in two states")
        if len(free) + self.cached + len(owned) != self.size or min(self._references, default=0) < 0:
            raise IntegrityError("a KV block is in no state")
        for key, block in self._by_key.items():
            if block in free or not any(identity.key == key for identity in self._identities[block]):
                raise IntegrityError(f"a hash leads to KV block {block}, which does not hold it")
        identified = {block for block, identities in enumerate(self._identities) if identities}
        if identified != set(self._by_key.values()) or not cached <= identified:
            raise IntegrityError("a KV block has an identity under which it cannot be found, or is cached without one")
        for visual in (False, True):
            if self._owned[visual] != sum(self._visual[block] is visual for block in owned):
                raise IntegrityError("the count of owned KV blocks of a kind is wrong")
            if any(self._visual[block] is not visual for block in self._cached[visual]):
                raise IntegrityError("a cached KV block is among those of the other kind")

    def _evict(self, visual: bool) -> int:
        if not self.cached:
            raise IntegrityError("a KV block was allocated beyond the plan")
        kind = self._kind_to_evict(visual)
        block = self._cached[kind].pop()
        assert block is not None
        if self._watcher is not None:
            self._watcher.leaving(block, self._identities[block])
        self._forget(block)
        self.evictions[kind] += 1
        return block

    def _kind_to_evict(self, visual: bool) -> bool:
        """Whose cached block goes when one of a kind is needed: a borrower's; between two borrowers, the oldest."""
        own, other = self._cached[visual], self._cached[not visual]
        if not own or not other:
            return visual if own else not visual
        if self.held(not visual) <= self._claims[not visual]:
            return visual
        if self.held(visual) < self._claims[visual]:
            return not visual
        age = {kind: self._released_at[next(iter(self._cached[kind]))] for kind in (False, True)}
        return age[True] < age[False]

    def _forget(self, block: int) -> None:
        for identity in self._identities[block]:
            del self._by_key[identity.key]
        self._identities[block] = []
        self._hits[block] = 0
