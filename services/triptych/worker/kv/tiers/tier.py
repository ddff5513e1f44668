"""What every tier below the device can do."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from triptych.worker.kv.identity import BlockIdentity

BlockBytes = NDArray[np.uint8]
"""The bytes of one block, [layout.block_bytes], contiguous."""

Keep = Callable[[BlockIdentity], bool]
"""Tells of which blocks a tier must not rid itself for lack of room."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds and did, by modality where it matters.

    Attributes:
        text_bytes: Bytes of blocks that are mostly text.
        visual_bytes: Bytes of blocks that are mostly visual.
        budget_bytes: Most bytes it may hold; 0 where it does not know.
        blocks: Blocks it holds.
        counts: What happened since the start, by (event, modality): hit, miss, store, evict, failure; see `TierBooks`.
    """

    text_bytes: int
    visual_bytes: int
    budget_bytes: int
    blocks: int
    counts: dict[tuple[str, str], int]


class Tier(Protocol):
    """A place for blocks. A failure inside is a miss, is counted and logged, and never raised.

    `put` and `get` may take long and are called from the threads that move blocks; the others are quick. All may be
    called from any thread.

    Attributes:
        name: What it is called.
        knows: Whether `contains` and `identities` tell all there is; a shared server does not.
    """

    name: str
    knows: bool

    def contains(self, identity: BlockIdentity) -> bool:
        """Tells whether `get` would find a block, as far as that is known without looking far."""

    def put(self, blocks: Sequence[tuple[BlockIdentity, BlockBytes]]) -> int:
        """Stores copies of blocks, consecutive ones of a chain together. Returns how many are there afterwards."""

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        """Fills `outs` with the blocks of these identities, and returns how many leading ones it found.

        A block is found only if its stored identity is the same in full and its bytes are undamaged.
        """

    def drop(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Forgets all blocks of which `doomed` is true. Returns how many."""

    def identities(self) -> list[BlockIdentity]:
        """Returns what is here, as far as that is known without looking far."""

    def usage(self) -> Usage:
        """Returns what it holds and did."""

    def check_integrity(self) -> None:
        """Raises IntegrityError unless its books add up."""

    def close(self) -> None:
        """Gives back what it holds open."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier that others fill as well, so that what it holds is known only by asking."""

    def covers(self, identities: Sequence[BlockIdentity]) -> int:
        """Asks how many leading blocks it has; takes up to its timeout."""


def modality(identity: BlockIdentity) -> str:
    """Returns `visual` or `text`."""
    return "visual" if identity.is_visual else "text"


Moves = Counter[tuple[str, str]]
"""Blocks that moved, by the way they took and modality."""


def note_moves(moves: Moves, way: str, identities: Iterable[BlockIdentity]) -> None:
    """Counts blocks that took a way."""
    for identity in identities:
        moves[way, modality(identity)] += 1


class TierBooks:
    """Counts what happens in a tier, and logs failures: each kind once, so that a broken disk cannot fill the log.

    Events: `hit` and `miss` in `get`; `store` in `put`; `evict` for lack of room; `failure` when something that should
    be there or should be possible is not: a damaged file, a full disk, a server that does not answer.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._name = name
        self._log = log
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: set[str] = set()

    def count(self, event: str, identities: Iterable[BlockIdentity]) -> None:
        """Counts an event of each block."""
        for identity in identities:
            self._counts[event, modality(identity)] += 1

    def failed(self, what: str, why: object, identities: Iterable[BlockIdentity] = ()) -> None:
        """Counts a failure, of each block or of something that is none, and logs it if it is the first of its kind."""
        blocks = list(identities)
        self.count("failure", blocks)
        if not blocks:
            self._counts["failure", "none"] += 1
        if what not in self._logged:
            self._logged.add(what)
            self._log.warning("KV %s tier: %s: %s (further ones are counted, not logged)", self._name, what, why)

    def recovered(self, what: str) -> None:
        """Lets a kind of failure be logged again."""
        self._logged.discard(what)

    def counts(self) -> dict[tuple[str, str], int]:
        """Returns a copy of the counts."""
        return dict(self._counts)
