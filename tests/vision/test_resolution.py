"""The rule by which load lowers resolution."""

from hypothesis import given
from hypothesis import strategies as st

from tests.router.fakes import SPEC
from triptych.v1 import inference_pb2
from triptych.vision.resolution import (
    HIGH,
    LOW,
    MEDIUM,
    THUMBNAIL,
    Ceiling,
    Load,
    Thresholds,
    ceiling_at,
    choose_detail,
    encoded_side,
    next_ceiling,
)

REQUESTED = inference_pb2.RESOLUTION_REASON_REQUESTED
MEMORY = inference_pb2.RESOLUTION_REASON_MEMORY
PENDING = inference_pb2.RESOLUTION_REASON_PENDING
ECONOMY = inference_pb2.RESOLUTION_REASON_ECONOMY
RULE = Thresholds()

loads = st.builds(Load, headroom=st.floats(0, 1), pending=st.integers(0, 40))
details = st.sampled_from([0, HIGH, MEDIUM, LOW, THUMBNAIL])


def test_presets_are_those_of_a_vit_14_at_336_and_shares_of_any_other() -> None:
    from dataclasses import replace

    sides = [encoded_side(detail, replace(SPEC, image_side=336)) for detail in (HIGH, MEDIUM, LOW, THUMBNAIL)]
    assert sides == [336, 224, 168, 112]
    assert [SPEC.token_count(side) for side in sides] == [576, 256, 144, 64]
    assert [encoded_side(detail, SPEC) for detail in (0, HIGH, MEDIUM, LOW, THUMBNAIL)] == [112, 112, 70, 56, 42]


def test_little_memory_or_many_pending_requests_lower_the_ceiling() -> None:
    assert ceiling_at(Load(1.0, 0), RULE) == (HIGH, REQUESTED)
    assert ceiling_at(Load(0.4, 10), RULE) == (HIGH, REQUESTED)
    assert ceiling_at(Load(0.39, 0), RULE) == (MEDIUM, MEMORY)
    assert ceiling_at(Load(1.0, 11), RULE) == (MEDIUM, PENDING)
    assert ceiling_at(Load(0.19, 0), RULE) == (LOW, MEMORY)
    assert ceiling_at(Load(0.39, 21), RULE) == (LOW, PENDING)


def test_economy_gets_one_step_less_and_never_less_than_a_thumbnail() -> None:
    idle = Ceiling()
    assert choose_detail(HIGH, idle, economy=True) == (MEDIUM, ECONOMY)
    assert choose_detail(THUMBNAIL, idle, economy=True) == (THUMBNAIL, REQUESTED)
    assert choose_detail(HIGH, Ceiling(LOW, MEMORY), economy=True) == (THUMBNAIL, MEMORY)


@given(details, loads, st.booleans())
def test_load_only_ever_lowers_what_was_asked(requested: int, load: Load, economy: bool) -> None:
    detail, reason = choose_detail(requested, next_ceiling(Ceiling(), load, RULE, 0.0), economy=economy)
    assert detail >= (requested or HIGH)
    assert (detail == (requested or HIGH)) == (reason == REQUESTED)


def test_the_ceiling_falls_at_once_and_rises_after_the_load_has_eased_for_a_while() -> None:
    ceiling = next_ceiling(Ceiling(), Load(1.0, 21), RULE, 0.0)
    assert ceiling.detail == LOW
    ceiling = next_ceiling(ceiling, Load(1.0, 19), RULE, 1.0)  # Under the threshold, but not eased.
    assert ceiling == Ceiling(LOW, PENDING)
    ceiling = next_ceiling(ceiling, Load(1.0, 16), RULE, 2.0)
    assert ceiling == Ceiling(LOW, PENDING, eased_since_s=2.0)
    ceiling = next_ceiling(ceiling, Load(1.0, 18), RULE, 3.0)  # Up again: the wait begins anew.
    assert ceiling == Ceiling(LOW, PENDING)
    ceiling = next_ceiling(ceiling, Load(1.0, 9), RULE, 4.0)
    assert next_ceiling(ceiling, Load(1.0, 9), RULE, 5.9).detail == LOW
    assert next_ceiling(ceiling, Load(1.0, 9), RULE, 6.0).detail == MEDIUM
    assert next_ceiling(ceiling, Load(1.0, 0), RULE, 6.0).detail == HIGH


@given(st.lists(st.tuples(loads, st.floats(0.0, 1.0)), min_size=1, max_size=60))
def test_the_ceiling_never_flaps_within_the_hold_time(steps: list[tuple[Load, float]]) -> None:
    ceiling, now_s, lowered_s = Ceiling(), 0.0, 0.0
    for load, passed_s in steps:
        now_s += passed_s
        following = next_ceiling(ceiling, load, RULE, now_s)
        assert following.detail >= ceiling_at(load, RULE)[0]
        if following.detail > ceiling.detail:
            lowered_s = now_s
        if following.detail < ceiling.detail:
            assert now_s - lowered_s >= RULE.hold_s
        ceiling = following
