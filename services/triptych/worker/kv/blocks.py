"""Who holds which block of the KV cache, and which blocks can be reused."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from triptych.errors import IntegrityError
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity


def blocks_for(tokens: int) -> int:
    """Returns how many blocks `tokens` positions take."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Fixed-size pool of KV blocks with reference counts.

    A block is free, owned (at least one reference) or cached (no reference, and reachable by its identity). Cached
    blocks are evicted when no free one is left, the longest unreferenced first. Not thread-safe: only the engine's
    thread calls it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._identities: list[BlockIdentity | None] = [None] * size
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """Blocks with at least one reference."""
        return self.size - self.available

    @property
    def cached(self) -> int:
        """Unreferenced blocks kept for reuse."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """Returns how many holders a block has."""
        return self._references[block]

    def is_identified(self, block: int) -> bool:
        """Tells whether a block can be found by its identity."""
        return self._identities[block] is not None

    def match(self, chain: Iterable[BlockIdentity]) -> tuple[int, ...]:
        """Returns the blocks that hold the longest known start of a chain. Takes no reference."""
        found: list[int] = []
        for identity in chain:
            block = self._by_key.get(identity.key)
            if block is None or self._identities[block] != identity:
                break
            found.append(block)
        return tuple(found)

    def allocate(self) -> int:
        """Returns a block with one reference and no identity, evicting the oldest cached one if none is free.

        Raises IntegrityError when nothing is available: the scheduler plans within `available`.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise IntegrityError("a KV block was allocated beyond the plan")
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference to an owned or cached block."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise IntegrityError(f"KV block {block} was acquired while free")
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one reference from each block of a table, last first: a chain's tail is evicted before its head."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise IntegrityError(f"KV block {block} was released while unreferenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._identities[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def identify(self, block: int, identity: BlockIdentity) -> None:
        """Makes an owned block, now full, reachable by its identity; does nothing if another block already is."""
        if self._references[block] == 0 or self._identities[block] is not None:
            raise IntegrityError(f"KV block {block} was identified while unreferenced or twice")
        if identity.key not in self._by_key:
            self._by_key[identity.key] = block
            self._identities[block] = identity

    def drop_cached(self) -> None:
        """Frees every cached block."""
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free + owned + cached is the size and no identity leads to a free block."""
        free, cached = set(self._free), set(self._cached)
        owned = {block for block, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free) or free & cached or (free | cached) & owned:
            raise IntegrityError("a KV block is in two states")
        if len(free) + len(cached) + len(owned) != self.size or min(self._references, default=0) < 0:
            raise IntegrityError("a KV block is in no state")
        for key, block in self._by_key.items():
            identity = self._identities[block]
            if identity is None or identity.key != key or block in free:
                raise IntegrityError(f"a hash leads to KV block {block}, which does not hold it")
        identified = {block for block, identity in enumerate(self._identities) if identity is not None}
        if identified != set(self._by_key.values()) or not cached <= identified:
            raise IntegrityError("a KV block has an identity under which it cannot be found, or is cached without one")

    def _forget(self, block: int) -> None:
        identity = self._identities[block]
        if identity is None:
            raise IntegrityError(f"cached KV block {block} has no identity")
        self._identities[block] = None
        del self._by_key[identity.key]
