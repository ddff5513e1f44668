"""Blocks on their way down and up: whatever happens, what comes back is what was computed, byte for byte."""

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.worker.driving import identity_of
from tests.worker.kv.blocks import LAYOUT, bytes_of, chain_of, filled
from triptych.errors import InvalidRequest
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.hierarchy import Hierarchy, PinnedBlocks, dependents_of
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity, VisualSpan, identify_block
from triptych.worker.kv.saving import WritePolicy
from triptych.worker.kv.tiers.disk import DiskTier
from triptych.worker.kv.tiers.host import HostTier
from triptych.worker.kv.tiers.tier import BlockBytes
from triptych.worker.model.config import DecoderConfig, RopeConfig

CONFIG = DecoderConfig(
    LAYOUT.layers, 32, 64, 4, LAYOUT.kv_heads, LAYOUT.head_dim, 10, 1e-5, 512, RopeConfig(1e4), True, torch.float32
)


class Bench:
    """A device pool with its tensors over host and disk, and "requests" that compute blocks as their identity says."""

    def __init__(
        self,
        blocks: int = 8,
        slots: int = 32,
        folder: Path | None = None,
        disk_blocks: int = 1000,
        policy: WritePolicy = "write_through",
    ) -> None:
        pinned = PinnedBlocks()
        below = [DiskTier(folder, LAYOUT, disk_blocks * LAYOUT.block_bytes, keep=pinned)] if folder else []
        self.cache = KVCache(CONFIG, blocks, torch.device("cpu"), torch.float32)
        self.host = HostTier(LAYOUT, slots * LAYOUT.block_bytes, has_below=bool(below), keep=pinned)
        self.hierarchy = Hierarchy(self.cache, LAYOUT, self.host, below, policy=policy, pinned=pinned)
        self.pool = BlockPool(blocks, watcher=self.hierarchy)
        self.computed = 0

    def run(self, chain: Sequence[BlockIdentity]) -> list[int]:
        """Brings up what is cached of a chain, computes the rest, and returns the block table, which it holds."""
        table = list(self.pool.match(chain))
        for block in table:
            self.pool.acquire(block)
        fetch = self.hierarchy.fetch(chain[len(table) :])
        assert fetch.wait(10)
        held = fetch.held()[: self.pool.available]
        new = [self.pool.allocate(identity.is_visual) for identity, _ in held]
        self.hierarchy.restore([(*pair, block) for pair, block in zip(held, new, strict=True)])
        table += new
        self.hierarchy.close_fetch(fetch)
        while len(table) < len(chain) and self.pool.available:
            identity = chain[len(table)]
            block = self.pool.allocate(identity.is_visual)
            rows = torch.from_numpy(bytes_of(identity).copy()).view(torch.float32).view(1, *LAYOUT.shape)
            self.cache.scatter([block], rows)
            self.computed += 1
            table.append(block)
        for block, identity in zip(table, chain, strict=False):
            if not self.pool.is_identified(block):
                self.pool.identify(block, identity)
        self.check(table, chain)
        return table

    def visit(self, chain: Sequence[BlockIdentity]) -> int:
        """Runs a chain and gives its blocks back. Returns how many had to be computed."""
        before = self.computed
        self.pool.release(self.run(chain))
        return self.computed - before

    def check(self, table: Sequence[int], chain: Sequence[BlockIdentity]) -> None:
        for block, identity in zip(table, chain, strict=False):
            row = self.cache.gather([block]).flatten().view(torch.uint8).numpy()
            assert row.tobytes() == bytes_of(identity).tobytes()

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.hierarchy.check_integrity()

    def close(self) -> None:
        self.hierarchy.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def start(disk: bool = False, **options: object) -> Bench:
        benches.append(Bench(folder=tmp_path if disk else None, **options))  # type: ignore[arg-type]
        return benches[-1]

    yield start
    for bench in benches:
        bench.hierarchy.flush()
        bench.check_integrity()
        bench.close()


def test_what_the_device_evicts_comes_back_from_the_host(make: Callable[..., Bench]) -> None:
    bench = make()
    chains = [chain_of(name, 6, visual=4) for name in range(5)]
    for missing in (6, 0):
        for chain in chains:
            assert bench.visit(chain) == missing
            assert bench.hierarchy.flush()  # A block that is wanted before it is safe below is lost.


def test_what_the_host_evicts_comes_back_from_disk_and_after_a_restart(make: Callable[..., Bench]) -> None:
    for policy in ("write_through", "write_back"):
        bench = make(disk=True, slots=64, policy=policy)
        chains = [chain_of(100 * len(policy) + name, 6) for name in range(16)]
        for chain in chains:
            assert bench.visit(chain) == 6
            assert bench.hierarchy.flush()
        assert [bench.visit(chain) for chain in chains] == [0] * 16
        bench.close()
        again = make(disk=True, slots=64, policy=policy)
        assert [again.visit(chain) for chain in chains] == [0] * 16
        again.close()


def test_write_back_writes_to_disk_only_what_the_host_has_no_room_for(make: Callable[..., Bench]) -> None:
    lazy, eager = make(disk=True, slots=64, policy="write_back"), make(slots=64)
    for bench in (lazy, eager):
        for name in range(3):
            bench.visit(chain_of(name, 6))
        bench.hierarchy.flush()
    assert lazy.hierarchy.usages()["disk"].blocks == 0
    assert lazy.hierarchy.usages()["host"].blocks < eager.hierarchy.usages()["host"].blocks == 18


class Gate(HostTier):
    """A host tier into which a copy lasts until the test lets it end."""

    def __init__(self, slots: int) -> None:
        super().__init__(LAYOUT, slots * LAYOUT.block_bytes)
        self.filling, self.go_on = threading.Event(), threading.Event()

    def fill(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        super().fill(slots, rows)
        if threading.current_thread().name == "kv-save":
            self.filling.set()
            assert self.go_on.wait(10)


def gated() -> tuple[BlockPool, KVCache, Gate, Hierarchy]:
    cache, host = KVCache(CONFIG, 2, torch.device("cpu"), torch.float32), Gate(8)
    hierarchy = Hierarchy(cache, LAYOUT, host)
    return BlockPool(2, watcher=hierarchy), cache, host, hierarchy


def test_a_block_on_its_way_down_stays_usable_and_a_cancelled_move_leaves_no_trace() -> None:
    pool, cache, host, hierarchy = gated()
    (identity,) = chain_of(1, 1)
    block = pool.allocate()
    cache.scatter([block], torch.from_numpy(bytes_of(identity).copy()).view(torch.float32).view(1, *LAYOUT.shape))
    pool.identify(block, identity)
    assert host.filling.wait(10)
    assert pool.match([identity]) == (block,)
    assert not host.contains(identity)
    pool.forget([block])  # The engine wants it back: what was copied must never be found.
    cache.wipe([block])
    host.go_on.set()
    assert hierarchy.flush()
    assert not host.contains(identity)
    assert host.usage().blocks == 0
    pool.release([block])
    hierarchy.check_integrity()
    hierarchy.close()


def test_a_block_that_must_go_before_its_move_ends_is_copied_on_the_spot() -> None:
    pool, cache, host, hierarchy = gated()
    first, second = chain_of(1, 2)
    for identity in (first, second):
        block = pool.allocate()
        cache.scatter([block], torch.from_numpy(bytes_of(identity).copy()).view(torch.float32).view(1, *LAYOUT.shape))
        pool.identify(block, identity)
        pool.release([block])
        assert host.filling.wait(10)
    taken = [pool.allocate(), pool.allocate()]
    cache.wipe(taken)
    host.go_on.set()
    hierarchy.flush()
    assert host.contains(first)
    assert host.contains(second)
    for identity in (first, second):
        slot = host.lease(identity)
        assert slot is not None
        assert host.view(slot).tobytes() == bytes_of(identity).tobytes()
        host.release([identity])
    assert hierarchy.moves()["urgent", "text"] == 2
    hierarchy.check_integrity()
    hierarchy.close()


class SlowTier(DiskTier):
    """A disk that takes its time."""

    delay_s = 0.3

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        time.sleep(self.delay_s)
        return super().get(identities, outs)


def test_a_fetch_that_nobody_waits_for_any_longer_gives_back_what_still_comes(tmp_path: Path) -> None:
    cache = KVCache(CONFIG, 4, torch.device("cpu"), torch.float32)
    disk = SlowTier(tmp_path, LAYOUT, 1 << 30)
    host = HostTier(LAYOUT, 64 * LAYOUT.block_bytes, has_below=True)
    hierarchy = Hierarchy(cache, LAYOUT, host, [disk])
    chain = chain_of(1, 8)
    disk.put(filled(chain))
    started_s = time.monotonic()
    fetch = hierarchy.fetch(chain)
    assert not fetch.wait(0.05)
    hierarchy.close_fetch(fetch)
    assert time.monotonic() - started_s < SlowTier.delay_s
    assert fetch.wait(10)
    hierarchy.flush()
    hierarchy.check_integrity()
    assert host.leases == 0
    assert hierarchy.covers(chain) == 8
    hierarchy.close()


def test_positions_behind_an_image_never_leave_with_its_part_of_a_block(make: Callable[..., Bench]) -> None:
    bench = make()
    ids, span = list(range(32)), [VisualSpan(0, 20, identity_of("p"))]
    whole = identify_block(bytes(32), ids, span, 0)
    part = identify_block(whole.key, ids, span, BLOCK_TOKENS, 4)
    assert (part.tokens, part.is_visual, part.images) == (4, True, (identity_of("p"),))
    block = bench.pool.allocate()
    rows = torch.full((1, *LAYOUT.shape), torch.nan)
    rows[:, :, :4] = 1.5
    bench.cache.scatter([block], rows)
    bench.pool.identify(block, part)
    bench.hierarchy.flush()
    fetch = bench.hierarchy.fetch([], {0: [part]})
    assert [identity for identity, _ in fetch.held()] == [part]
    bench.hierarchy.restore([(*fetch.held()[0], block)])
    got = bench.cache.gather([block])[0]
    assert (got[:, :4] == 1.5).all()
    assert (got[:, 4:] == 0).all()
    bench.hierarchy.close_fetch(fetch)
    bench.pool.forget([block])
    bench.pool.release([block])


def test_pinned_images_survive_any_traffic_and_dropped_ones_are_gone_everywhere(make: Callable[..., Bench]) -> None:
    bench = make(disk=True, slots=16, disk_blocks=30)
    chain = chain_of(1, 4, visual=3)
    bench.visit(chain)
    bench.hierarchy.flush()
    bench.hierarchy.pin(identity_of(1))
    for name in range(2, 30):
        bench.visit(chain_of(name, 4))
        bench.hierarchy.flush()
    assert bench.hierarchy.covers(chain) >= 3
    assert bench.visit(chain) <= 1
    doomed = dependents_of(identity_of(1), [*chain, *bench.hierarchy.identities()])
    assert all(map(doomed, chain))  # The text behind the picture was computed from it.
    bench.pool.drop(doomed)
    bench.hierarchy.drop(doomed)
    bench.hierarchy.unpin(identity_of(1))
    assert bench.visit(chain) == 4
    with pytest.raises(InvalidRequest, match="kv_host_bytes"):
        for name in range(40, 43):
            bench.visit(chain_of(name, 7, visual=4))
            bench.hierarchy.flush()
            bench.hierarchy.pin(identity_of(name))


class HierarchyMachine(RuleBasedStateMachine):
    """Requests come and go, tiers lose things, the worker restarts: every block that is ever held is right."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.dice = random.Random(0)
        self.policy: WritePolicy = "write_through"
        self.bench = Bench(10, 12, self.folder, 40, self.policy)
        self.tables: list[tuple[list[int], list[BlockIdentity]]] = []

    @precondition(lambda self: len(self.tables) < 3)
    @rule(name=st.integers(0, 6), blocks=st.integers(1, 6), visual=st.integers(0, 3))
    def request(self, name: int, blocks: int, visual: int) -> None:
        chain = chain_of(name, max(blocks, visual), visual)
        self.tables.append((self.bench.run(chain), chain))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.bench.pool.release(table)

    @rule()
    def flush(self) -> None:
        assert self.bench.hierarchy.flush()

    @rule()
    def tend(self) -> None:
        self.bench.hierarchy.tend(self.bench.pool)

    @rule(name=st.integers(0, 6), abandon=st.booleans())
    def prefetch(self, name: int, abandon: bool) -> None:
        fetch = self.bench.hierarchy.fetch(chain_of(name, 4))
        if not abandon:
            fetch.wait(10)
        self.bench.hierarchy.close_fetch(fetch)

    @rule(name=st.integers(0, 6))
    def drop(self, name: int) -> None:
        held = [identity for _, chain in self.tables for identity in chain]
        doomed = dependents_of(identity_of(name), [*held, *self.bench.hierarchy.identities()])
        self.bench.pool.drop(doomed)
        self.bench.hierarchy.drop(doomed)

    @rule(seed=st.integers(0, 1000))
    def damage(self, seed: int) -> None:
        dice = random.Random(seed)
        files = sorted((self.folder / "triptych-kv").glob("*.kv"))
        if files:
            path = dice.choice(files)
            match dice.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])
                case 2:
                    data = bytearray(path.read_bytes())
                    data[dice.randrange(len(data))] ^= 255
                    path.write_bytes(data)

    @rule(write_back=st.booleans())
    def restart(self, write_back: bool) -> None:
        for table, _ in self.tables:
            self.bench.pool.release(table)
        self.tables.clear()
        self.bench.close()
        self.policy = "write_back" if write_back else "write_through"
        self.bench = Bench(10, 12, self.folder, 40, self.policy)

    @invariant()
    def what_is_held_is_right_and_the_books_add_up(self) -> None:
        for table, chain in self.tables:
            self.bench.check(table, chain)
        self.bench.check_integrity()

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.folder)


HierarchyMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHierarchy = HierarchyMachine.TestCase
