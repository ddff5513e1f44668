"""The host tier: blocks in one slab of host memory."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from triptych.errors import IntegrityError
from triptych.worker.kv.eviction import SecondChance
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.tier import BlockBytes, Keep, TierBooks, Usage, modality

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    identity: BlockIdentity
    slot: int
    leases: int = 0


class HostTier:
    """Blocks in slots of a slab that is allocated once, pinned where a GPU copies from it.

    A slot is free, reserved (being filled) or an entry's. An entry is evicted only when nobody leases it and it is
    clean: its bytes are safe below. With nothing below, every entry is clean. Thread-safe.

    Attributes:
        slots: How many blocks fit.
        leases: How many leases are held in all.
    """

    name = "host"
    knows = True

    def __init__(
        self,
        layout: BlockLayout,
        budget_bytes: int,
        *,
        pinned: bool = False,
        has_below: bool = False,
        keep: Keep = lambda identity: False,
    ) -> None:
        """`has_below`: blocks count as clean only once `mark_clean` says so. `keep`: which are never evicted."""
        self.slots = budget_bytes // layout.block_bytes
        self.leases = 0
        self._block_bytes = layout.block_bytes
        self._slab = torch.empty((self.slots, layout.block_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._views = self._slab.numpy()
        self._has_below = has_below
        self._keep = keep
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._order: SecondChance[bytes] = SecondChance()
        self._dirty: dict[bytes, None] = {}
        self._free = list(range(self.slots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._bytes = {"text": 0, "visual": 0}
        self._books = TierBooks(self.name, log)

    @property
    def clean(self) -> int:
        """Slots that are free or hold blocks that are safe below, which `reserve` can mostly give out at once."""
        with self._lock:
            return len(self._free) + len(self._order) - len(self._dirty)

    @property
    def has_dirty(self) -> bool:
        """Whether any block is not safe below."""
        return bool(self._dirty)

    def slot(self, identity: BlockIdentity) -> int:
        """Returns the slot of a block that the caller leases."""
        with self._lock:
            return self._entries[identity.key].slot

    def view(self, slot: int) -> BlockBytes:
        """Returns a slot's bytes, to be read by who leases its entry and written by who reserved it."""
        view: BlockBytes = self._views[slot]
        return view

    def rows(self, slots: Sequence[int]) -> torch.Tensor:
        """Returns a copy of slots' bytes, [slots, block_bytes], in host memory."""
        return self._slab[torch.tensor(slots, dtype=torch.long)]

    def fill(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Writes reserved slots; `rows` are [slots, block_bytes] in host memory."""
        self._slab[torch.tensor(slots, dtype=torch.long)] = rows

    def contains(self, identity: BlockIdentity) -> bool:
        """Tells whether a block is here."""
        with self._lock:
            return self._find(identity) is not None

    def reserve(self, count: int) -> list[int]:
        """Takes up to `count` slots, evicting what may go. They are to be published or cancelled."""
        slots: list[int] = []
        with self._lock:
            while len(slots) < count:
                if not self._free:
                    victim = self._order.pop(self._may_go)
                    if victim is None:
                        break
                    self._books.count("evict", [self._entries[victim].identity])
                    self._forget(victim)
                slots.append(self._free.pop())
            self._reserved.update(slots)
        return slots

    def publish(self, slot: int, identity: BlockIdentity, *, lease: bool = False, clean: bool = False) -> int:
        """Makes a filled slot a block that can be found. Returns its slot: another one if the block was here before."""
        with self._lock:
            self._reserved.remove(slot)
            entry = self._entries.get(identity.key)
            if entry is None:
                entry = self._entries[identity.key] = _Entry(identity, slot)
                if self._has_below and not clean:
                    self._dirty[identity.key] = None
                self._bytes[modality(identity)] += self._block_bytes
                self._books.count("store", [identity])
            else:
                self._free.append(slot)
            if identity.key not in self._order:
                self._order.add(identity.key)
            entry.leases += lease
            self.leases += lease
            return entry.slot

    def cancel(self, slots: Sequence[int]) -> None:
        """Gives back reserved slots."""
        with self._lock:
            self._reserved.difference_update(slots)
            self._free += slots

    def lease(self, identity: BlockIdentity) -> int | None:
        """Returns the slot of a block, which then stays until `release`; None if it is not here."""
        with self._lock:
            entry = self._find(identity)
            if entry is None:
                self._books.count("miss", [identity])
                return None
            entry.leases += 1
            self.leases += 1
            self._order.hit(identity.key)
            self._books.count("hit", [identity])
            return entry.slot

    def release(self, identities: Sequence[BlockIdentity]) -> None:
        """Gives back one lease of each block. Blocks dropped in between are forgotten with their last lease."""
        with self._lock:
            for identity in identities:
                entry = self._entries[identity.key]
                if entry.leases <= 0:
                    raise IntegrityError("a host block was released more often than leased")
                entry.leases -= 1
                self.leases -= 1
                if entry.leases == 0 and identity.key not in self._order:
                    self._forget(identity.key)

    def dirty(self, most: int) -> list[BlockIdentity]:
        """Returns blocks that are not safe below, the oldest first, each with a lease for the caller."""
        with self._lock:
            found = [self._entries[key] for key in islice(self._dirty, most)]
            for entry in found:
                entry.leases += 1
            self.leases += len(found)
            return [entry.identity for entry in found]

    def mark_clean(self, identities: Sequence[BlockIdentity]) -> None:
        """Notes that blocks are safe below, or cannot be made so: they may be evicted."""
        with self._lock:
            for identity in identities:
                self._dirty.pop(identity.key, None)

    def put(self, blocks: Sequence[tuple[BlockIdentity, BlockBytes]]) -> int:
        """Stores copies of blocks while there is room; see `Tier`."""
        stored = 0
        for identity, data in blocks:
            if not self.contains(identity):
                slots = self.reserve(1)
                if not slots:
                    continue
                self.view(slots[0])[:] = data
                self.publish(slots[0], identity)
            stored += 1
        return stored

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        """Copies leading blocks that are here; see `Tier`."""
        for found, (identity, out) in enumerate(zip(identities, outs, strict=True)):
            slot = self.lease(identity)
            if slot is None:
                return found
            out[:] = self.view(slot)
            self.release([identity])
        return len(identities)

    def drop(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Forgets blocks, leased ones once they are given back; see `Tier`."""
        with self._lock:
            keys = [key for key in self._order if doomed(self._entries[key].identity)]
            for key in keys:
                self._order.remove(key)
                if not self._entries[key].leases:
                    self._forget(key)
        return len(keys)

    def identities(self) -> list[BlockIdentity]:
        """Returns what is here, the least recently used first."""
        with self._lock:
            return [self._entries[key].identity for key in self._order]

    def usage(self) -> Usage:
        """Returns what it holds and did."""
        with self._lock:
            held = self._bytes
            budget = self.slots * self._block_bytes
            return Usage(held["text"], held["visual"], budget, len(self._entries), self._books.counts())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every slot is in one state, and order and bytes agree with the entries."""
        with self._lock:
            used = [entry.slot for entry in self._entries.values()]
            if sorted([*used, *self._free, *self._reserved]) != list(range(self.slots)):
                raise IntegrityError("a slot of the host tier is in no state or in two")
            live = {key for key, entry in self._entries.items() if key in self._order or entry.leases}
            if live != set(self._entries) or not set(self._order) <= live or not set(self._dirty) <= live:
                raise IntegrityError("the host tier's order and its blocks differ")
            if any(entry.leases < 0 or entry.identity.key != key for key, entry in self._entries.items()):
                raise IntegrityError("a host block has a wrong key or count of leases")
            if self.leases != sum(entry.leases for entry in self._entries.values()):
                raise IntegrityError("the host tier's count of leases is wrong")
            if sum(self._bytes.values()) != len(used) * self._block_bytes:
                raise IntegrityError("the host tier's bytes do not add up")

    def close(self) -> None:
        """Forgets everything."""
        self.drop(lambda identity: True)

    def _find(self, identity: BlockIdentity) -> _Entry | None:
        entry = self._entries.get(identity.key)
        if entry is None or entry.identity != identity or identity.key not in self._order:
            return None
        return entry

    def _may_go(self, key: bytes) -> bool:
        entry = self._entries[key]
        return not entry.leases and key not in self._dirty and not self._keep(entry.identity)

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._dirty.pop(key, None)
        self._bytes[modality(entry.identity)] -= self._block_bytes
        self._free.append(entry.slot)
