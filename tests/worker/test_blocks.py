"""The block pool's books under any sequence of operations, and the identity of blocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.errors import IntegrityError
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity, VisualSpan, identify_block, root_key

SIZE = 6


def chain_of(token_ids: list[int], spans: tuple[VisualSpan, ...] = (), salt: str = "") -> list[BlockIdentity]:
    chain: list[BlockIdentity] = []
    for index in range(len(token_ids) // BLOCK_TOKENS):
        parent = chain[-1].key if chain else root_key(salt)
        chain.append(identify_block(parent, token_ids, spans, index * BLOCK_TOKENS))
    return chain


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and give back blocks in any order; a plain model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.tables: list[list[int]] = []
        self.names: dict[int, BlockIdentity] = {}

    @precondition(lambda self: self.pool.available > 0)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert all(block not in table for table in self.tables)
        assert not self.pool.is_identified(block)
        self.names.pop(block, None)
        self.tables.append([block])

    @precondition(lambda self: self.pool.available > 0 and self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        block = self.pool.allocate()
        self.names.pop(block, None)
        table.append(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.integers(0, 4))
    def identify(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if not self.pool.is_identified(block):
            identity = chain_of([name] * BLOCK_TOKENS)[0]
            known = identity in self.names.values()
            self.pool.identify(block, identity)
            if not known:
                self.names[block] = identity

    @rule(name=st.integers(0, 4))
    def reuse(self, name: int) -> None:
        identity = chain_of([name] * BLOCK_TOKENS)[0]
        found = self.pool.match([identity])
        assert [self.names[block] for block in found] == [identity] * len(found)
        assert bool(found) == (identity in self.names.values())
        for block in found:
            self.pool.acquire(block)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @rule()
    def drop(self) -> None:
        self.pool.drop()
        self.names = {}

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check_integrity()
        held = {block for table in self.tables for block in table}
        assert self.pool.owned == len(held)
        assert self.pool.available == SIZE - len(held)
        for block in held:
            assert self.pool.references(block) == sum(block in table for table in self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_longest_unreferenced_block_is_evicted_first_and_a_chains_tail_before_its_head() -> None:
    pool = BlockPool(3)
    chain = chain_of(list(range(3 * BLOCK_TOKENS)))
    table = [pool.allocate() for _ in range(3)]
    for block, identity in zip(table, chain, strict=True):
        pool.identify(block, identity)
    pool.release(table)
    assert pool.match(chain) == tuple(table)
    pool.allocate()
    assert pool.match(chain) == tuple(table[:2])


def test_a_block_is_never_given_out_twice_nor_released_twice() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(IntegrityError):
        pool.allocate()
    pool.release([block])
    with pytest.raises(IntegrityError):
        pool.release([block])
    with pytest.raises(IntegrityError):
        pool.acquire(block)


def test_a_hit_is_checked_against_the_stored_content_not_the_hash_alone() -> None:
    pool = BlockPool(1)
    identity = chain_of(list(range(BLOCK_TOKENS)))[0]
    pool.identify(pool.allocate(), identity)
    forged = BlockIdentity(identity.key, identity.parent, b"other content")
    assert pool.match([forged]) == ()


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_two_images_never_share_a_block_and_one_image_does_whatever_the_placeholder_id() -> None:
    tokens = [5] * 32
    first, second = (VisualSpan(2, 30, bytes([name]) * 32) for name in (1, 2))
    assert chain_of(tokens, (first,)) != chain_of(tokens, (second,))
    other_ids = [5, 5, *[9] * 30]
    assert chain_of(tokens, (first,)) == chain_of(other_ids, (first,))


def test_the_place_within_an_image_counts() -> None:
    spans = [(VisualSpan(start, 40, bytes(32)),) for start in (0, 1)]
    chains = [chain_of([7] * 48, span) for span in spans]
    assert chains[0][1].content != chains[1][1].content


def test_text_that_spells_an_image_is_not_that_image() -> None:
    assert chain_of([5] * 16) != chain_of([5] * 16, (VisualSpan(0, 16, bytes(32)),))


def test_salts_separate_tenants() -> None:
    assert chain_of(list(range(16)), salt="a")[0].key != chain_of(list(range(16)), salt="b")[0].key


def test_a_block_depends_on_everything_before_it() -> None:
    same = list(range(16))
    assert chain_of([*[1] * 16, *same])[1].key != chain_of([*[2] * 16, *same])[1].key
