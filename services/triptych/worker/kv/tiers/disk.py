"""The disk tier: files of runs of blocks in a directory of its own."""

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from triptych.errors import IntegrityError
from triptych.worker.kv.eviction import SecondChance
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.run_file import SUFFIX, TEMPORARY, DamagedRun, Run, read_block, read_run, write_run
from triptych.worker.kv.tiers.tier import BlockBytes, Keep, TierBooks, Usage, modality

log = logging.getLogger(__name__)

# Seconds without an attempt to write after one has failed.
_WRITE_PAUSE_S = 5.0


class DiskTier:
    """Runs of blocks in files, found through an index in memory that is rebuilt at the start.

    Whole files are evicted, least recently used first. Bytes are in no order with the machine's power supply: after a
    crash a file may be damaged, which its checksums tell. Thread-safe; no lock is held while bytes move.
    """

    name = "disk"
    knows = True

    def __init__(
        self, folder: Path, layout: BlockLayout, budget_bytes: int, *, keep: Keep = lambda identity: False
    ) -> None:
        """Takes possession of `folder`/triptych-kv, which is made if need be, and drops what cannot be used there.

        Raises ValueError when it is another user's or another worker's, and OSError.
        """
        self._folder = folder / "triptych-kv"
        self._layout, self._budget_bytes, self._keep = layout, budget_bytes, keep
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._places: dict[bytes, tuple[Run, int]] = {}
        self._order: SecondChance[str] = SecondChance()
        self._bytes = 0
        self._modality_bytes = {"text": 0, "visual": 0}
        self._writable_at_s = 0.0
        self._books = TierBooks(self.name, log)
        self._owner: int | None = _take(self._folder)
        self._rebuild()

    def contains(self, identity: BlockIdentity) -> bool:
        """Tells whether a file should have a block."""
        with self._lock:
            return self._find(identity) is not None

    def put(self, blocks: Sequence[tuple[BlockIdentity, BlockBytes]]) -> int:
        """Writes those blocks that are not here as one file; see `Tier`."""
        new = [block for block in blocks if not self.contains(block[0])]
        present = len(blocks) - len(new)
        if not new or time.monotonic() < self._writable_at_s:
            return present
        if not self._make_room(len(new) * self._layout.block_bytes):
            return present
        try:
            run = write_run(self._folder, self._layout, new)
        except OSError as error:
            self._writable_at_s = time.monotonic() + _WRITE_PAUSE_S
            self._books.failed("writing", error, (identity for identity, _ in new))
            return present
        self._books.recovered("writing")
        with self._lock:
            self._add(run)
        self._books.count("store", run.identities)
        self._make_room(0)  # The header's share.
        return len(blocks)

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        """Reads leading blocks; see `Tier`. A file that disappoints is dropped."""
        opened: dict[str, int] = {}
        with ExitStack() as descriptors:
            for found, (identity, out) in enumerate(zip(identities, outs, strict=True)):
                with self._lock:
                    place = self._find(identity)
                    if place is not None and place[0].path.name not in opened:
                        self._order.hit(place[0].path.name)
                if place is None:
                    self._books.count("miss", [identity])
                    return found
                run, index = place
                try:
                    if run.path.name not in opened:
                        descriptor = opened[run.path.name] = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
                        descriptors.callback(os.close, descriptor)
                        os.utime(descriptor)  # The order of eviction survives a restart.
                    read_block(opened[run.path.name], run, index, out)
                except (OSError, DamagedRun) as error:
                    self._lose(run, error)
                    self._books.count("miss", [identity])
                    return found
                self._books.count("hit", [identity])
        return len(identities)

    def drop(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Deletes every file that holds a doomed block, with its other blocks; see `Tier`. Returns how many blocks."""
        with self._lock:
            runs = [run for run in self._runs.values() if any(map(doomed, run.identities))]
            for run in runs:
                self._remove(run)
        for run in runs:
            self._unlink(run)
        return sum(len(run.identities) for run in runs)

    def identities(self) -> list[BlockIdentity]:
        """Returns what is here."""
        with self._lock:
            return [run.identities[index] for run, index in self._places.values()]

    def usage(self) -> Usage:
        """Returns what it holds and did; bytes of headers count as those of the text."""
        with self._lock:
            visual = self._modality_bytes["visual"]
            blocks = len(self._places)
            return Usage(self._bytes - visual, visual, self._budget_bytes, blocks, self._books.counts())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless index, order and sizes agree."""
        with self._lock:
            if set(self._order) != set(self._runs):
                raise IntegrityError("the disk tier's order and its files differ")
            if self._bytes != sum(run.size_bytes for run in self._runs.values()):
                raise IntegrityError("the disk tier's bytes do not add up")
            blocks = sum(self._modality_bytes.values())
            if blocks != sum(len(run.identities) for run in self._runs.values()) * self._layout.block_bytes:
                raise IntegrityError("the disk tier's bytes by modality do not add up")
            for key, (run, index) in self._places.items():
                if run.path.name not in self._runs or run.identities[index].key != key:
                    raise IntegrityError("a key leads to a file that does not hold it")

    def close(self) -> None:
        """Gives the folder back; the files stay."""
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def _rebuild(self) -> None:
        found: list[tuple[float, Run]] = []
        for path in self._folder.iterdir():
            if path.suffix == TEMPORARY:
                with suppress(OSError):
                    path.unlink()
            elif path.suffix == SUFFIX:
                try:
                    found.append((path.stat().st_mtime, read_run(path, self._layout)))
                except (OSError, DamagedRun) as error:
                    self._books.failed(f"dropping a file, {error}", path.name)
                    with suppress(OSError):
                        path.unlink()
        for _, run in sorted(found, key=lambda pair: pair[0]):
            self._add(run)
        self._make_room(0)

    def _find(self, identity: BlockIdentity) -> tuple[Run, int] | None:
        place = self._places.get(identity.key)
        return place if place is not None and place[0].identities[place[1]] == identity else None

    def _make_room(self, size_bytes: int) -> bool:
        """Evicts files until `size_bytes` more fit into the budget. Returns whether they do."""
        if size_bytes > self._budget_bytes:
            return False
        doomed: list[Run] = []
        with self._lock:
            while self._bytes + size_bytes > self._budget_bytes:
                name = self._order.pop(self._may_go)
                if name is None:
                    break
                self._order.add(name)
                doomed.append(self._runs[name])
                self._remove(doomed[-1])
            fits = self._bytes + size_bytes <= self._budget_bytes
        for run in doomed:
            self._books.count("evict", run.identities)
            self._unlink(run)
        return fits

    def _may_go(self, name: str) -> bool:
        return not any(map(self._keep, self._runs[name].identities))

    def _add(self, run: Run) -> None:
        self._runs[run.path.name] = run
        self._order.add(run.path.name)
        self._bytes += run.size_bytes
        for index, identity in enumerate(run.identities):
            self._places[identity.key] = run, index
            self._modality_bytes[modality(identity)] += self._layout.block_bytes

    def _remove(self, run: Run) -> None:
        del self._runs[run.path.name]
        self._order.remove(run.path.name)
        self._bytes -= run.size_bytes
        for identity in run.identities:
            self._modality_bytes[modality(identity)] -= self._layout.block_bytes
            if self._places.get(identity.key, (None,))[0] is run:
                del self._places[identity.key]

    def _lose(self, run: Run, error: Exception) -> None:
        """Drops a file that could not be read, unless it was evicted meanwhile, which is no failure."""
        with self._lock:
            if run.path.name not in self._runs:
                return
            self._remove(run)
        self._books.failed("reading", error, run.identities)
        self._unlink(run)

    def _unlink(self, run: Run) -> None:
        try:
            run.path.unlink(missing_ok=True)
        except OSError as error:
            self._books.failed("deleting", error)


def _take(folder: Path) -> int:
    """Makes a folder private and locks it as long as the returned descriptor is open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise ValueError(f"{folder} (kv_disk_dir) belongs to another user; name a folder of your own")
    if stat.S_IMODE(about.st_mode) != 0o700:
        folder.chmod(0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{folder} (kv_disk_dir) is in use by another worker; give each worker its own") from None
    return descriptor
