"""The way up: blocks of a chain are collected in the host tier, where they stay until somebody takes them."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from triptych.worker.kv.cost import CostModel
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.tiers.host import HostTier
from triptych.worker.kv.tiers.tier import Moves, Tier, note_moves

log = logging.getLogger(__name__)

_BATCH = 16  # Blocks read between two looks at whether they are still wanted.


class Fetch:
    """Blocks on their way up. Whoever asked for it must `close` it.

    Attributes:
        wanted: The full blocks asked for, in the order of the chain.
        parts: Blocks that are worth having when the full ones end: by how many of them there are.
        started_s: When it was asked for, on the monotonic clock.
    """

    def __init__(self, host: HostTier, wanted: Sequence[BlockIdentity], parts: Mapping[int, Sequence[BlockIdentity]]):
        self.wanted = tuple(wanted)
        self.parts = dict(parts)
        self.started_s = time.monotonic()
        self._host = host
        self._lock = threading.Lock()
        self._held: list[tuple[BlockIdentity, int]] = []
        self._closed = False
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    @property
    def closed(self) -> bool:
        """Whether nobody wants it any more."""
        return self._closed

    def held(self) -> list[tuple[BlockIdentity, int]]:
        """Returns what is there, each with its slot in the host tier: the first of `wanted`, then at most one part."""
        with self._lock:
            return list(self._held)

    @property
    def rest(self) -> tuple[BlockIdentity, ...]:
        """The full blocks that are not there yet."""
        return self.wanted[len(self._held) :]

    @property
    def rest_parts(self) -> tuple[BlockIdentity, ...]:
        """The blocks of which one is worth having now that no more full ones come."""
        return tuple(self.parts.get(len(self._held), ()))

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is done. Returns whether it is."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Gives back what it holds; what still arrives is given back on arrival. May be called twice."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, []
        self._host.release([identity for identity, _ in held])

    def take(self, identity: BlockIdentity, slot: int) -> None:
        """Takes over the lease of a slot."""
        with self._lock:
            if not self._closed:
                self._held.append((identity, slot))
                return
        self._host.release([identity])

    def finish(self) -> None:
        """Notes that nothing more will come."""
        self._done.set()


class Fetcher:
    """Starts fetches. What is in the host tier is there at once; the rest is read by threads of its own.

    Attributes:
        arrived: Set whenever a fetch got done.
        moves: Blocks read, by the way they took and modality: `disk_to_host`, …
    """

    def __init__(self, host: HostTier, below: Sequence[Tier], cost: CostModel, threads: int = 2) -> None:
        self._host, self._below, self._cost = host, tuple(below), cost
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kv-fetch")
        self.arrived = threading.Event()
        self.moves: Moves = Counter()

    def fetch(
        self, wanted: Sequence[BlockIdentity], parts: Mapping[int, Sequence[BlockIdentity]], *, at_any_cost: bool
    ) -> Fetch:
        """Begins to collect leading blocks of `wanted`. Never waits for a disk or a network.

        `at_any_cost`: also from tiers from which loading takes longer than computing.
        """
        tiers = [tier for tier in self._below if at_any_cost or self._cost.pays(tier.name)]
        fetch = Fetch(self._host, wanted, parts)
        if at_any_cost or self._cost.pays(self._host.name):
            while fetch.rest and self._take(fetch, fetch.rest[0]):
                pass
            following = (*fetch.rest[:1], *fetch.rest_parts)
            if tiers and any(tier.contains(identity) for tier in tiers for identity in following):
                self._threads.submit(self._run, fetch, tiers)
                return fetch
            any(self._take(fetch, part) for part in fetch.rest_parts)
        fetch.finish()
        return fetch

    def close(self) -> None:
        """Ends the threads after what they are reading."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _take(self, fetch: Fetch, identity: BlockIdentity) -> bool:
        slot = self._host.lease(identity)
        if slot is not None:
            fetch.take(identity, slot)
        return slot is not None

    # From here on: in the fetcher's threads.

    def _run(self, fetch: Fetch, tiers: list[Tier]) -> None:
        try:
            while fetch.rest and not fetch.closed:
                batch = fetch.rest[:_BATCH]
                if not self._take(fetch, batch[0]) and not any(self._read(fetch, tier, batch) for tier in tiers):
                    break
            if not fetch.closed:
                any(
                    self._take(fetch, part) or any(self._read(fetch, tier, [part]) for tier in tiers)
                    for part in fetch.rest_parts
                )
        except Exception:
            log.exception("KV blocks could not be fetched")
        finally:
            fetch.finish()
            self.arrived.set()

    def _read(self, fetch: Fetch, tier: Tier, identities: Sequence[BlockIdentity]) -> int:
        """Reads leading blocks from a tier into the host tier, and leases them. Returns how many."""
        if not tier.contains(identities[0]):
            return 0
        slots = self._host.reserve(len(identities))
        identities = identities[: len(slots)]
        start_s = time.perf_counter()
        try:
            found = tier.get(identities, [self._host.view(slot) for slot in slots])
        except BaseException:
            self._host.cancel(slots)
            raise
        if found:
            self._cost.note_load(tier.name, found, time.perf_counter() - start_s)
            note_moves(self.moves, f"{tier.name}_to_host", identities[:found])
        # What the lowest tier had is now dirty, unless that is the only one: then it need not be written again.
        clean = tier is self._below[0]
        for identity, slot in zip(identities[:found], slots, strict=False):
            fetch.take(identity, self._host.publish(slot, identity, lease=True, clean=clean))
        self._host.cancel(slots[found:])
        return found
