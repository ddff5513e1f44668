"""The host tier: budget, order of eviction, leases."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.kv.blocks import LAYOUT, bytes_of, chain_of, filled, found
from triptych.worker.kv.eviction import SecondChance
from triptych.worker.kv.tiers.host import HostTier


def host(slots: int, has_below: bool = False) -> HostTier:
    return HostTier(LAYOUT, slots * LAYOUT.block_bytes + 5, has_below=has_below)


def test_blocks_come_back_byte_for_byte_up_to_the_first_that_is_missing() -> None:
    tier = host(8)
    chain = chain_of(1, 6)
    assert tier.put(filled([*chain[:3], *chain[4:]])) == 5
    assert found(tier, chain) == 3
    assert found(tier, chain[4:]) == 2


def test_a_block_with_the_key_of_another_is_not_taken_for_it() -> None:
    tier = host(8)
    (block,) = chain_of(1, 1)
    tier.put(filled([block]))
    for impostor in (replace(block, content=block.content[:-1] + b"?"), replace(block, parent=bytes(32))):
        assert not tier.contains(impostor)
        assert found(tier, [impostor]) == 0


def test_the_least_recently_used_goes_first_but_what_was_hit_twice_has_a_second_chance() -> None:
    tier = host(3)
    a, b, c, d, e, f = (chain_of(name, 1)[0] for name in range(6))
    tier.put(filled([a, b, c]))
    for _ in range(2):
        assert found(tier, [a]) == 1
    tier.put(filled([d, e]))
    assert [tier.contains(one) for one in (a, b, c, d, e)] == [True, False, False, True, True]
    tier.put(filled([f]))
    assert not tier.contains(a) or not tier.contains(d)
    assert tier.usage().blocks == 3


def test_leased_blocks_stay_and_dropped_ones_go_with_their_last_lease() -> None:
    tier = host(2)
    a, b, c = (chain_of(name, 1)[0] for name in range(3))
    tier.put(filled([a, b]))
    slot = tier.lease(a)
    assert slot is not None
    tier.lease(b)
    assert tier.put(filled([c])) == 0
    assert tier.drop(lambda identity: identity == a) == 1
    assert not tier.contains(a)
    assert tier.view(slot).tobytes() == bytes_of(a).tobytes()
    tier.check_integrity()
    tier.release([a])
    assert tier.put(filled([c])) == 1
    tier.release([b])
    tier.check_integrity()


def test_blocks_not_yet_safe_below_are_not_evicted() -> None:
    tier = host(2, has_below=True)
    a, b, c = (chain_of(name, 1)[0] for name in range(3))
    tier.put(filled([a, b]))
    assert tier.put(filled([c])) == 0
    assert tier.dirty(5) == [a, b]
    tier.release([a, b])
    tier.mark_clean([a])
    assert tier.put(filled([c])) == 1
    assert [tier.contains(one) for one in (a, b, c)] == [False, True, True]
    tier.check_integrity()


def test_what_is_to_be_kept_is_never_evicted() -> None:
    kept = chain_of(0, 1)[0]
    tier = HostTier(LAYOUT, 2 * LAYOUT.block_bytes, keep=lambda identity: identity == kept)
    tier.put(filled([kept]))
    for name in range(1, 5):
        tier.put(filled(chain_of(name, 1)))
    assert tier.contains(kept)


def test_bytes_are_counted_by_modality() -> None:
    tier = host(8)
    tier.put(filled(chain_of(1, 5, visual=3)))
    usage = tier.usage()
    assert (usage.visual_bytes, usage.text_bytes) == (3 * LAYOUT.block_bytes, 2 * LAYOUT.block_bytes)
    assert usage.counts["store", "visual"] == 3


def test_no_budget_is_no_tier_but_no_error() -> None:
    tier = HostTier(LAYOUT, 0)
    assert tier.put(filled(chain_of(1, 2))) == 0
    assert found(tier, chain_of(1, 2)) == 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 6))
def test_books_add_up_whatever_is_put_leased_released_dropped(seed: int, slots: int) -> None:
    dice, tier = random.Random(seed), host(slots, has_below=True)
    blocks = [chain_of(name, 1)[0] for name in range(9)]
    leased = []
    for _ in range(60):
        one = dice.choice(blocks)
        match dice.randrange(6):
            case 0:
                tier.put(filled([one]))
            case 1:
                if tier.lease(one) is not None:
                    leased.append(one)
            case 2 if leased:
                tier.release([leased.pop(dice.randrange(len(leased)))])
            case 3:
                doomed = one
                tier.drop(lambda identity, doomed=doomed: identity == doomed)  # type: ignore[misc]
            case 4:
                tier.mark_clean([one])
            case 5:
                tier.cancel(tier.reserve(1))
        assert found(tier, [one]) <= 1
        assert tier.leases == len(leased)
    tier.release(leased)
    tier.check_integrity()
    assert tier.leases == 0


@settings(max_examples=100, deadline=None)
@given(hits=st.lists(st.integers(0, 3), min_size=1, max_size=8), kept=st.sets(st.integers(0, 7)))
def test_everything_that_may_go_goes_in_the_end(hits: list[int], kept: set[int]) -> None:
    order: SecondChance[int] = SecondChance()
    for key, count in enumerate(hits):
        order.add(key, count)
    gone: list[int] = []
    while (victim := order.pop(lambda key: key not in kept)) is not None:
        gone.append(victim)
    assert sorted(gone) == sorted(set(range(len(hits))) - kept)
    assert gone == sorted(gone, key=lambda key: (hits[key] > 1, key))
