"""The way down: a thread that copies blocks from the device to the host tier, and from there to the tiers below."""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from triptych.errors import IntegrityError
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity
from triptych.worker.kv.tiers.host import HostTier
from triptych.worker.kv.tiers.tier import Moves, Tier, note_moves

log = logging.getLogger(__name__)

WritePolicy = Literal["write_through", "write_back"]

_BATCH = 32  # Blocks that move together: a run on disk.
_MOST_QUEUED = 4096
# With write_back, this share of the host tier is kept free or safe below, so that a block always finds a place there.
_CLEAN_SHARE = 4


@dataclass(slots=True, eq=False)
class _Save:
    block: int
    identity: BlockIdentity
    cancelled: bool = False


class Saver:
    """Moves blocks down in a thread of its own; the engine's thread only queues and cancels.

    A queued block stays where it is and can be used there. When the engine needs it for something else first, it
    cancels, and bytes that were read meanwhile are thrown away: they become visible below only under the lock, and
    only if nobody cancelled.

    Attributes:
        moves: Blocks moved, by the way they took (`device_to_host`, `host_to_disk`, …) and modality; `urgent` are those
            that the engine had to copy itself, `lost` those for which there was no room then.
    """

    def __init__(self, cache: KVCache, host: HostTier, below: Sequence[Tier], policy: WritePolicy) -> None:
        self._cache, self._host, self._below, self._policy = cache, host, tuple(below), policy
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: OrderedDict[bytes, _Save] = OrderedDict()
        self._moving: dict[bytes, _Save] = {}
        self._by_block: dict[int, list[_Save]] = {}
        self._stopping = False
        self._busy = False
        self.moves: Moves = Counter()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def queue(self, block: int, identity: BlockIdentity) -> None:
        """Asks for a block to be saved; does nothing when it is queued already, or when too many are."""
        with self._lock:
            if len(self._queue) >= _MOST_QUEUED or identity.key in self._queue or identity.key in self._moving:
                return
            save = _Save(block, identity)
            self._queue[identity.key] = save
            self._by_block.setdefault(block, []).append(save)
            self._wake.notify()

    def cancel(self, block: int) -> None:
        """Makes sure that nothing read from a block from now on is taken for what it was asked to hold."""
        with self._lock:
            for save in self._by_block.pop(block, ()):
                save.cancelled = True
                self._queue.pop(save.identity.key, None)

    def save_now(self, block: int, identities: Sequence[BlockIdentity]) -> None:
        """Copies a block to the host tier at once, if there is room: the caller is about to overwrite it."""
        slots = self._host.reserve(len(identities))
        if slots:
            row = self._cache.gather([block])
            for identity, slot in zip(identities, slots, strict=False):
                self._host.fill([slot], _only(row, [identity]))
                self._host.publish(slot, identity)
        note_moves(self.moves, "urgent", identities[: len(slots)])
        note_moves(self.moves, "lost", identities[len(slots) :])
        if slots and self._below:
            with self._lock:
                self._wake.notify()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or moving."""
        with self._lock:
            return not self._busy and not self._queue

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything queued is saved, and with tiers below the host, is safe there. False: too late."""
        with self._lock:
            return self._wake.wait_for(lambda: not self._busy and not self._queue, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends the thread after bringing everything as far down as the time allows."""
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the queue and the blocks it is about agree."""
        with self._lock:
            waiting = {id(save) for save in (*self._queue.values(), *self._moving.values()) if not save.cancelled}
            if waiting != {id(save) for saves in self._by_block.values() for save in saves}:
                raise IntegrityError("the saves of KV blocks and the blocks they are of differ")

    # From here on: in the saver's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                self._wake.notify_all()
                while not self._queue and not self._stopping and not self._must_push():
                    self._wake.wait()
                if self._stopping and not self._queue:
                    break
                self._busy = True
                batch = [self._queue.popitem(last=False)[1] for _ in range(min(_BATCH, len(self._queue)))]
                self._moving = {save.identity.key: save for save in batch}
            try:
                self._save(batch)
                while self._must_push() and not self._queue:
                    self._push_down()
            except Exception:
                log.exception("KV blocks could not be saved")
            finally:
                self._forget(batch)
        while self._below and self._push_down():
            pass

    def _save(self, batch: list[_Save]) -> None:
        """Copies blocks from the device to the host tier."""
        new = [save for save in batch if not save.cancelled and not self._host.contains(save.identity)]
        if not new:
            return
        if self._below and self._host.clean < len(new):
            self._push_down()
        slots = self._host.reserve(len(new))
        new = new[: len(slots)]
        if not slots:
            return
        try:
            rows = self._cache.gather([save.block for save in new])
            self._host.fill(slots, _only(rows, [save.identity for save in new]))
        except BaseException:
            self._host.cancel(slots)
            raise
        with self._lock:
            for save, slot in zip(new, slots, strict=True):
                if save.cancelled:
                    self._host.cancel([slot])
                else:
                    self._host.publish(slot, save.identity)
                    note_moves(self.moves, "device_to_host", [save.identity])

    def _must_push(self) -> bool:
        if not self._below or not self._host.has_dirty:
            return False
        return self._policy == "write_through" or self._host.clean < self._host.slots // _CLEAN_SHARE

    def _push_down(self) -> bool:
        """Copies some blocks from the host tier to those below. Returns whether there were any."""
        identities = self._host.dirty(_BATCH)
        if not identities:
            return False
        try:
            blocks = [(identity, self._host.view(self._host.slot(identity))) for identity in identities]
            for tier in self._below:
                stored = tier.put(blocks)
                note_moves(self.moves, f"host_to_{tier.name}", identities[:stored])
        finally:
            # What a tier did not take is not tried again for ever: its tier counts the failure.
            self._host.mark_clean(identities)
            self._host.release(identities)
        return True

    def _forget(self, batch: list[_Save]) -> None:
        with self._lock:
            self._moving = {}
            for save in batch:
                saves = self._by_block.get(save.block, [])
                if save in saves:
                    saves.remove(save)
                if not saves:
                    self._by_block.pop(save.block, None)


def _only(rows: torch.Tensor, identities: Sequence[BlockIdentity]) -> torch.Tensor:
    """Returns rows as bytes, [rows, block_bytes], with zeros at positions that an identity does not cover.

    These may belong to somebody who still computes them, and even not be finite.
    """
    for row, identity in enumerate(identities):
        tokens = identity.tokens
        if tokens < BLOCK_TOKENS:
            rows = rows.clone() if len(identities) < len(rows) else rows
            rows[row, :, tokens:] = 0
    return rows[: len(identities)].flatten(1).contiguous().view(torch.uint8)
