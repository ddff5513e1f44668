"""The vision planner under any sequence of arrivals, cancels and completions."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import IntegrityError
from triptych.vision.scheduler import BatchPlan, EncodeClass, Flight, Item, Limits, VisionQueue, plan_batch, rank_of

SIDES = (14, 28, 56, 112, 224, 448)
LIMITS = Limits(pixel_budget=112 * 112 * 4, max_inflight=2, batch_timeout_s=0.5, lift_s=2.0)


def item(number: int, side: int = 56, arrival_s: float = 0.0, priority: int = 1, lift_s: float = 2.0) -> Item:
    rank = rank_of(arrival_s, EncodeClass(priority), lift_s)
    return Item(number, (side, side), side * side, arrival_s, rank)


def queue(*items: Item) -> VisionQueue:
    queue = VisionQueue()
    for one in items:
        queue.add(one)
    return queue


def numbers(plan: BatchPlan) -> list[int]:
    return [one.number for one in plan.items]


def test_a_lone_image_leaves_at_once_when_the_encoder_is_idle_and_nothing_is_arriving() -> None:
    assert numbers(plan_batch(queue(item(1)), Flight(), LIMITS, 0.0, arriving=False)) == [1]


def test_a_lone_image_waits_for_one_that_is_arriving_and_no_longer_than_the_batch_timeout() -> None:
    waiting = queue(item(1))
    assert plan_batch(waiting, Flight(), LIMITS, 0.1, arriving=True).wait_s == pytest.approx(0.4)
    assert numbers(plan_batch(waiting, Flight(), LIMITS, 0.5, arriving=True)) == [1]


def test_a_batch_is_full_at_its_share_of_the_budget_whatever_the_number_of_images() -> None:
    small = [item(number, 56) for number in range(20)]
    assert len(plan_batch(queue(*small), Flight(1, 56 * 56), LIMITS, 0.0, arriving=True).items) == 8
    large = [item(number, 112) for number in range(20)]
    assert len(plan_batch(queue(*large), Flight(1, 56 * 56), LIMITS, 0.0, arriving=True).items) == 2


def test_an_image_as_large_as_four_counts_as_four() -> None:
    limits = Limits(pixel_budget=4 * 1920 * 1080, max_inflight=1, batch_timeout_s=1, lift_s=1)
    hd = [Item(n, (1080, 1920), 1080 * 1920, 0.0, 0.0) for n in range(9)]
    uhd = [Item(n, (2160, 3840), 2160 * 3840, 0.0, 0.0) for n in range(9)]
    assert len(plan_batch(hd, Flight(), limits, 0.0, arriving=False).items) == 4
    assert len(plan_batch(uhd, Flight(), limits, 0.0, arriving=False).items) == 1


def test_only_images_of_one_shape_share_a_batch_in_order_of_rank() -> None:
    waiting = queue(item(1, 56), item(2, 28), item(3, 56), item(4, 28))
    assert numbers(plan_batch(waiting, Flight(), LIMITS, 0.0, arriving=False)) == [1, 3]


def test_an_image_over_the_budget_runs_alone_and_nothing_passes_it_meanwhile() -> None:
    waiting = queue(item(1, 448), item(2, 56))
    assert numbers(plan_batch(waiting, Flight(1, 1), LIMITS, 9.0, arriving=False)) == []
    assert numbers(plan_batch(waiting, Flight(), LIMITS, 0.0, arriving=False)) == [1]


def test_an_old_image_of_another_shape_hurries_the_batch_before_it() -> None:
    waiting = queue(item(1, 28, arrival_s=0.0, priority=2), item(2, 56, arrival_s=0.45, priority=0))
    busy = Flight(1, 28 * 28)
    assert plan_batch(waiting, busy, LIMITS, 0.46, arriving=True).wait_s == pytest.approx(0.04)
    assert numbers(plan_batch(waiting, busy, LIMITS, 0.5, arriving=True)) == [2]


def test_higher_classes_go_first_until_a_lower_one_has_waited_long_enough() -> None:
    economy = item(1, 56, arrival_s=0.0, priority=2)
    assert queue(economy, item(2, 28, arrival_s=3.9, priority=0))[0].number == 2
    assert queue(economy, item(3, 28, arrival_s=4.1, priority=0))[0] is economy


def test_an_image_that_must_be_alone_shares_no_batch() -> None:
    alone = Item(1, (56, 56), 56 * 56, 0.0, 0.0, alone=True)
    other = Item(2, (56, 56), 56 * 56, 0.0, 1.0)
    assert numbers(plan_batch([alone, other], Flight(), LIMITS, 9.0, arriving=False)) == [1]
    late = Item(3, (56, 56), 56 * 56, 0.0, 2.0, alone=True)
    assert numbers(plan_batch([other, late], Flight(), LIMITS, 9.0, arriving=False)) == [2]


def test_a_server_that_takes_few_images_at_once_gets_few() -> None:
    few = Limits(10**9, 1, 1.0, 1.0, max_images=3)
    waiting = [item(number) for number in range(9)]
    assert numbers(plan_batch(waiting, Flight(), few, 0.0, arriving=True)) == [0, 1, 2]


def test_removing_what_is_not_there_is_an_integrity_error() -> None:
    with pytest.raises(IntegrityError):
        queue(item(1)).remove(item(2))


@dataclass
class Simulation:
    """A queue and one encoder, driven by hand; every image must end exactly once."""

    limits: Limits
    now_s: float = 0.0
    queue: VisionQueue = field(default_factory=VisionQueue)
    flying: list[tuple[Item, ...]] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    arrived: list[Item] = field(default_factory=list)
    left: list[tuple[Item, ...]] = field(default_factory=list)

    @property
    def flight(self) -> Flight:
        return Flight(len(self.flying), sum(one.pixels for batch in self.flying for one in batch))

    def end(self, number: int, how: str) -> None:
        assert number not in self.ended
        self.ended[number] = how

    def arrive(self, side: int, priority: int) -> None:
        one = item(len(self.arrived), side, self.now_s, priority, self.limits.lift_s)
        self.arrived.append(one)
        self.queue.add(one)

    def cancel(self, number: int) -> None:
        one = self.arrived[number % len(self.arrived)] if self.arrived else None
        if one is not None and one in self.queue:
            self.queue.remove(one)
            self.end(one.number, "cancelled")

    def complete(self, index: int) -> None:
        if self.flying:
            for one in self.flying.pop(index % len(self.flying)):
                self.end(one.number, "served")

    def pump(self, *, arriving: bool) -> float | None:
        while True:
            before = list(self.queue), self.flight
            plan = plan_batch(self.queue, self.flight, self.limits, self.now_s, arriving=arriving)
            assert (list(self.queue), self.flight) == before  # Planning changes nothing.
            if not plan.items:
                return plan.wait_s
            self.check(plan)
            for one in plan.items:
                self.queue.remove(one)
            self.flying.append(plan.items)
            self.left.append(plan.items)

    def check(self, plan: BatchPlan) -> None:
        leader = plan.items[0]
        assert leader is self.queue[0]  # No starvation: whoever is first in turn leads the next batch.
        assert len({one.number for one in plan.items}) == len(plan.items)
        assert all(one in self.queue and one.shape == leader.shape for one in plan.items)
        assert len(plan.items) == 1 or plan.pixels <= self.limits.full_pixels
        assert len(plan.items) <= self.limits.max_images
        assert self.flight.batches < self.limits.max_inflight
        over = leader.pixels > self.limits.pixel_budget
        assert self.flight.pixels + plan.pixels <= self.limits.pixel_budget or (over and not self.flying)
        # Companions of one shape are taken in order, none of them left out.
        same = [one for one in self.queue if one.shape == leader.shape]
        assert list(plan.items) == same[: len(plan.items)]

    def check_integrity(self) -> None:
        self.queue.check_integrity()
        places = [*self.queue, *(one for batch in self.flying for one in batch)]
        assert len(places) + len(self.ended) == len(self.arrived)
        assert {one.number for one in places} | set(self.ended) == set(range(len(self.arrived)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from(SIDES), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("complete"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 30), st.just(0)),
    ),
    max_size=80,
)
KNOBS = st.builds(
    Limits,
    pixel_budget=st.sampled_from([14 * 14, 56 * 56, 112 * 112 * 4, 10**6]),
    max_inflight=st.integers(1, 3),
    batch_timeout_s=st.sampled_from([0.0, 0.5]),
    lift_s=st.sampled_from([0.0, 1.0, 5.0]),
    max_images=st.sampled_from([1, 3, 1 << 30]),
)


def drive(limits: Limits, steps: list[tuple[str, int, int]], arriving: Iterator[bool]) -> Simulation:
    simulation = Simulation(limits)
    for verb, number, other in steps:
        if verb == "arrive":
            simulation.arrive(number, other)
        elif verb == "wait":
            simulation.now_s += number / 10
        else:
            getattr(simulation, verb)(number)
        simulation.pump(arriving=next(arriving))
        simulation.check_integrity()
    return simulation


def alternating() -> Iterator[bool]:
    while True:
        yield True
        yield False
        yield False


@given(KNOBS, STEPS)
def test_no_batch_is_over_budget_and_the_state_stays_sound_whatever_happens(
    limits: Limits, steps: list[tuple[str, int, int]]
) -> None:
    drive(limits, steps, alternating())


@given(KNOBS, STEPS)
def test_every_image_ends_once_when_all_batches_do(limits: Limits, steps: list[tuple[str, int, int]]) -> None:
    simulation = drive(limits, steps, alternating())
    for _ in range(2 * len(simulation.arrived) + 2):
        wait_s = simulation.pump(arriving=True)
        simulation.now_s += wait_s or 0.0
        simulation.complete(0)
    simulation.check_integrity()
    assert not simulation.queue and not simulation.flying
    assert set(simulation.ended) == set(range(len(simulation.arrived)))


@given(KNOBS, STEPS)
def test_nobody_is_passed_but_within_the_bound_or_by_company_of_those_before(
    limits: Limits, steps: list[tuple[str, int, int]]
) -> None:
    simulation = drive(limits, steps, alternating())
    place = {one.number: index for index, batch in enumerate(simulation.left) for one in batch}
    for batch in simulation.left:
        leader = batch[0]
        for one in simulation.arrived:
            if place.get(one.number, len(simulation.left)) <= place[leader.number] or one.number in simulation.ended:
                continue
            # `one` was left behind by this leader: only a lower rank may do that, so within the stated seconds.
            if one.arrival_s <= leader.arrival_s:
                assert leader.arrival_s - one.arrival_s <= 2 * limits.lift_s


@given(STEPS)
def test_a_batch_that_may_leave_by_time_leaves_when_its_time_has_come(steps: list[tuple[str, int, int]]) -> None:
    simulation = drive(LIMITS, steps, alternating())
    wait_s = simulation.pump(arriving=True)
    if wait_s is not None:
        batches = len(simulation.left)
        simulation.now_s += wait_s + 1e-9
        simulation.pump(arriving=True)
        assert len(simulation.left) > batches
