"""The KV cache as a hierarchy: what leaves the device is kept below and comes back when it is asked for again."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from triptych.errors import IntegrityError, InvalidRequest
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.cost import CostModel
from triptych.worker.kv.fetching import Fetch, Fetcher
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.saving import Saver, WritePolicy
from triptych.worker.kv.tiers.host import HostTier
from triptych.worker.kv.tiers.tier import Moves, SharedTier, Tier, Usage, note_moves

# With write_back, blocks are saved ahead of their eviction when fewer than this share of the pool is free.
_AHEAD_SHARE = 8


class PinnedBlocks:
    """Which blocks no tier may evict: those of pinned images, and what stood before them when they were pinned."""

    def __init__(self) -> None:
        self.images: set[bytes] = set()
        self.keys: set[bytes] = set()

    def __call__(self, identity: BlockIdentity) -> bool:
        """Tells whether a block must be kept."""
        if not self.images:
            return False
        return identity.key in self.keys or not self.images.isdisjoint(identity.images)


class Hierarchy:
    """Moves blocks between the device's pool and the tiers below it.

    Down: with `write_through`, a block is saved as soon as it is full; with `write_back`, when it is likely to be
    evicted soon. Either way it stays usable where it is until its bytes are safe below, and a block that must go before
    that is copied on the spot. Up: `fetch` collects blocks in the host tier, `restore` copies them to the device.

    Methods are for the engine's thread; only `usages`, `moves`, `drop` and `flush` are for any.

    Attributes:
        layout: Shape of the blocks.
        host: The tier through which everything passes.
        below: The tiers below it, the nearest first.
        cost: What decides whether loading is worth it.
    """

    def __init__(
        self,
        cache: KVCache,
        layout: BlockLayout,
        host: HostTier,
        below: Sequence[Tier] = (),
        *,
        policy: WritePolicy = "write_through",
        pinned: PinnedBlocks | None = None,
    ) -> None:
        self.layout, self.host, self.below = layout, host, tuple(below)
        self.cost = CostModel()
        self.pinned = pinned or PinnedBlocks()
        self._cache, self._policy = cache, policy
        self._saver = Saver(cache, host, self.below, policy)
        self._fetcher = Fetcher(host, self.below, self.cost)
        self._open: set[Fetch] = set()
        self._restored: Moves = Counter()

    # Down

    def identified(self, block: int, identity: BlockIdentity) -> None:
        """A block can be reused now; see `PoolWatcher`."""
        if self._policy == "write_through":
            self.save([(block, identity)])

    def leaving(self, block: int, identities: Sequence[BlockIdentity]) -> None:
        """A block is about to be overwritten; see `PoolWatcher`."""
        self._saver.cancel(block)
        unsafe = [identity for identity in identities if not self.holds(identity)]
        if unsafe and self.cost.pays(self.host.name):
            self._saver.save_now(block, unsafe)

    def forgotten(self, block: int) -> None:
        """A block must not be used any more; see `PoolWatcher`."""
        self._saver.cancel(block)

    def tend(self, pool: BlockPool) -> None:
        """With `write_back`, saves the blocks that are to be evicted next while there is time."""
        ahead = pool.size // _AHEAD_SHARE
        if self._policy == "write_back" and pool.available - pool.cached < ahead:
            for _, (block, identities) in zip(range(ahead), pool.oldest_cached(), strict=False):
                self.save([(block, identity) for identity in identities])

    def save(self, blocks: Iterable[tuple[int, BlockIdentity]]) -> None:
        """Asks for blocks to be saved soon, in their order, unless they are safe below."""
        for block, identity in blocks:
            if not self.holds(identity):
                self._saver.queue(block, identity)

    @property
    def shared(self) -> SharedTier | None:
        """The tier that other workers fill, too; None where there is none."""
        return next((tier for tier in self.below if isinstance(tier, SharedTier)), None)

    def holds(self, identity: BlockIdentity) -> bool:
        """Tells whether a block is in a tier of this worker's own."""
        return any(tier.contains(identity) for tier in (self.host, *self.below) if tier.knows)

    # Up

    def covers(self, chain: Sequence[BlockIdentity]) -> int:
        """Returns how many leading blocks of a chain are in the host tier or should be below, without looking far."""
        tiers = (self.host, *self.below)
        for count, identity in enumerate(chain):
            if not any(tier.contains(identity) for tier in tiers):
                return count
        return len(chain)

    def fetch(
        self,
        wanted: Sequence[BlockIdentity],
        parts: Mapping[int, Sequence[BlockIdentity]] | None = None,
        *,
        at_any_cost: bool = False,
    ) -> Fetch:
        """Begins to collect leading blocks of `wanted` in the host tier; `close_fetch` must follow."""
        # Half of the host tier at most waits for requests: the rest is for what comes down.
        most = max(0, self.host.slots // 2 - sum(len(fetch.wanted) for fetch in self._open))
        fetch = self._fetcher.fetch(wanted[:most], parts or {}, at_any_cost=at_any_cost)
        self._open.add(fetch)
        return fetch

    def close_fetch(self, fetch: Fetch) -> None:
        """Ends a fetch; blocks that are still read are dropped on arrival."""
        fetch.close()
        self._open.discard(fetch)

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Waits until some fetch is done that was not when this was called last, or for `timeout_s`."""
        self._fetcher.arrived.wait(timeout_s)
        self._fetcher.arrived.clear()

    def restore(self, blocks: Sequence[tuple[BlockIdentity, int, int]]) -> None:
        """Copies leased slots of the host tier to blocks of the device: (what it is, slot, block) each."""
        if not blocks:
            return
        start_s = time.perf_counter()
        rows = self.host.rows([slot for _, slot, _ in blocks])
        shaped = rows.view(self.layout.torch_dtype).view(len(blocks), *self.layout.shape)
        self._cache.scatter([block for _, _, block in blocks], shaped)
        self.cost.note_load(self.host.name, len(blocks), time.perf_counter() - start_s)
        note_moves(self._restored, "host_to_device", (identity for identity, _, _ in blocks))

    # Inspection

    def usages(self) -> dict[str, Usage]:
        """Returns what each tier below the device holds and did."""
        return {tier.name: tier.usage() for tier in (self.host, *self.below)}

    def moves(self) -> Moves:
        """Returns how many blocks of which modality moved which way."""
        return self._saver.moves + self._fetcher.moves + self._restored

    def image_bytes(self) -> dict[bytes, dict[str, int]]:
        """Returns, for each image with blocks in host or disk, their bytes there."""
        found: dict[bytes, dict[str, int]] = defaultdict(dict)
        for tier in (self.host, *self.below):
            for identity in tier.identities():
                for image in identity.images:
                    found[image][tier.name] = found[image].get(tier.name, 0) + self.layout.block_bytes
        return found

    def identities(self) -> list[BlockIdentity]:
        """Returns the blocks of all tiers that know theirs; one that is in several is there several times."""
        return [identity for tier in (self.host, *self.below) for identity in tier.identities()]

    def drop(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Forgets blocks in all tiers below the device. Returns how many."""
        return sum(tier.drop(doomed) for tier in (self.host, *self.below))

    def pin(self, image: bytes) -> None:
        """Keeps an image's blocks from eviction below the device. Raises InvalidRequest when too much would be."""
        here = {identity.key: identity for identity in self.host.identities()}
        keys: set[bytes] = set()
        for identity in here.values():
            if image in identity.images:
                one: BlockIdentity | None = identity
                while one is not None and one.key not in keys:
                    keys.add(one.key)
                    one = here.get(one.parent)
        kept = sum(map(self.pinned, here.values())) + len(keys)
        if kept > self.host.slots // 2:
            raise InvalidRequest("half of the host tier is pinned already; unpin images or raise kv_host_bytes")
        self.pinned.images = self.pinned.images | {image}
        self.pinned.keys = self.pinned.keys | keys

    def unpin(self, image: bytes) -> None:
        """Lets an image's blocks be evicted again."""
        self.pinned.images = self.pinned.images - {image}
        if not self.pinned.images:
            self.pinned.keys = set()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until what was queued is saved. Returns whether it is."""
        return self._saver.flush(timeout_s)

    def check_integrity(self, fetches: Iterable[Fetch] = ()) -> None:
        """Raises IntegrityError unless all tiers are sound and exactly `fetches` are open."""
        for tier in (self.host, *self.below):
            tier.check_integrity()
        self._saver.check_integrity()
        if self._open != set(fetches):
            raise IntegrityError("fetches of KV blocks are open that nobody waits for")
        if not self._open and self._saver.is_idle and self.host.leases:
            raise IntegrityError("host blocks are leased by nobody")

    def close(self, timeout_s: float = 10.0) -> None:
        """Saves what is queued as far as the time allows, and gives everything back."""
        self._fetcher.close()
        self._saver.close(timeout_s)
        for tier in (self.host, *self.below):
            tier.close()


def dependents_of(image: bytes, known: Iterable[BlockIdentity]) -> Callable[[BlockIdentity], bool]:
    """Returns what tells, of `known` blocks, those of an image and those computed behind them."""
    children: dict[bytes, list[BlockIdentity]] = defaultdict(list)
    doomed: list[BlockIdentity] = []
    for identity in known:
        children[identity.parent].append(identity)
        if image in identity.images:
            doomed.append(identity)
    keys: set[bytes] = set()
    while doomed:
        identity = doomed.pop()
        if identity.key not in keys:
            keys.add(identity.key)
            doomed += children[identity.key]
    return lambda identity: identity.key in keys or image in identity.images
