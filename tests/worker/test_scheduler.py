"""Planning as a pure function: budget, order, preemption, and that everybody gets a turn."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import IntegrityError
from triptych.worker.detokenizer import TextStream
from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.request import GenerationRequest, SamplingOptions, StoppingOptions, TokenizedPrompt
from triptych.worker.engine.sampler import TokenChooser
from triptych.worker.engine.scheduler import StepPlan, commit, plan_step, release_blocks
from triptych.worker.engine.sequence import Phase, Rank, Sequence
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.identity import BLOCK_TOKENS

CPU = torch.device("cpu")


class Letters:
    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return ""


class Bench:
    """Queues and a pool, with a model that takes no time."""

    def __init__(self, blocks: int, tokens: int = 64, sequences: int = 16, max_wait_s: float = 5.0) -> None:
        self.waiting, self.running = AgingQueue(), AgingQueue()
        self.pool = BlockPool(blocks)
        self.budget = TokenBudget.of(tokens, sequences)
        self.max_wait_s = max_wait_s
        self.serial = 0
        self.finished: list[Sequence] = []

    def add(
        self, prompt: int, output: int, arrival_s: float = 0.0, priority: int = 1, first_token: int = 0
    ) -> Sequence:
        token_ids = tuple(range(first_token, first_token + prompt))
        request = GenerationRequest("x", TokenizedPrompt(token_ids), StoppingOptions(output))
        chooser = TokenChooser(SamplingOptions(), (), 1, CPU)
        rank = Rank(arrival_s + priority * self.max_wait_s, self.serial)
        self.serial += 1
        sequence = Sequence(request, rank, chooser, TextStream(Letters(), ()))
        self.waiting.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        return plan_step(self.waiting, self.running, self.budget, self.pool)

    def step(self) -> StepPlan:
        plan = self.plan()
        commit(plan, self.waiting, self.running, self.pool)
        done = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.completes)]
        for sequence in plan.decodes:
            sequence.computed += 1
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.end
        for sequence in done:
            sequence.phase = Phase.DECODE
            sequence.token_ids.append(0)
            if sequence.output_tokens == sequence.request.stopping.max_tokens:
                self.running.remove(sequence)
                sequence.phase = Phase.ENDED
                release_blocks(sequence, self.pool)
                self.finished.append(sequence)
        self.pool.check_integrity()
        return plan


WORK = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 40), st.integers(0, 2), st.floats(0, 30)), min_size=1, max_size=12
)


@settings(max_examples=80, deadline=None)
@given(work=WORK, blocks=st.integers(9, 40), tokens=st.integers(16, 80), sequences=st.integers(1, 20))
def test_every_request_ends_whatever_the_pool_and_no_step_exceeds_the_budget(
    work: list[tuple[int, int, int, float]], blocks: int, tokens: int, sequences: int
) -> None:
    bench = Bench(blocks, tokens, sequences)
    for prompt, output, priority, arrival_s in work:
        bench.add(prompt, output, arrival_s, priority)
    most_steps = 50 + 40 * sum(prompt + output for prompt, output, _, _ in work)
    while bench.waiting or bench.running:
        decoding = {s for s in bench.running if s.phase is Phase.DECODE}
        plan = bench.step()
        assert 0 < plan.tokens <= tokens
        assert len(bench.running) <= min(sequences, tokens)
        # Every sequence that could decode did, unless its blocks were taken by one of higher rank.
        assert decoding == set(plan.decodes) | (decoding & set(plan.preempted))
        most_steps -= 1
        assert most_steps > 0
    assert len(bench.finished) == len(work)
    assert bench.pool.owned == 0


@settings(max_examples=30, deadline=None)
@given(work=WORK)
def test_planning_changes_nothing(work: list[tuple[int, int, int, float]]) -> None:
    bench = Bench(12)
    for prompt, output, priority, arrival_s in work:
        bench.add(prompt, output, arrival_s, priority)
    for _ in range(10):
        before = (list(bench.waiting), list(bench.running), bench.pool.available, bench.pool.owned)
        first, second = bench.plan(), bench.plan()
        assert first == second
        assert before == (list(bench.waiting), list(bench.running), bench.pool.available, bench.pool.owned)
        bench.step()


def test_a_long_prefill_never_stalls_decodes() -> None:
    bench = Bench(200, tokens=32)
    talkers = [bench.add(4, 50) for _ in range(8)]
    bench.step()
    bench.add(1000, 1)
    for _ in range(30):
        plan = bench.step()
        assert set(plan.decodes) == set(talkers)
        assert plan.tokens == 32


def test_waiting_lifts_the_class_so_nobody_starves() -> None:
    bench = Bench(100, sequences=1, max_wait_s=5.0)
    economy = bench.add(4, 1, arrival_s=0.0, priority=2)
    turns = 0
    for second in range(100):
        bench.add(4, 1, arrival_s=float(second), priority=0)
        bench.step()
        turns += 1
        if economy in bench.finished:
            break
    # Two classes below, so it ranks with interactive requests that arrive ten seconds later.
    assert turns == 11


def test_within_a_class_the_oldest_goes_first_and_a_higher_class_before_it() -> None:
    bench = Bench(100, sequences=1)
    late, early = bench.add(4, 1, arrival_s=2.0), bench.add(4, 1, arrival_s=1.0)
    urgent = bench.add(4, 1, arrival_s=3.0, priority=0)
    for _ in range(3):
        bench.step()
    assert bench.finished == [urgent, early, late]


def test_when_blocks_run_out_the_last_in_rank_goes_back_and_returns() -> None:
    bench = Bench(4)
    first, last = bench.add(16, 40), bench.add(16, 30, first_token=500)
    preempted = [sequence for _ in range(80) for sequence in bench.step().preempted]
    assert preempted
    assert set(preempted) == {last}
    assert bench.finished == [first, last]


def test_an_admission_does_not_evict_what_another_admission_of_the_same_step_reuses() -> None:
    bench = Bench(7, tokens=256)
    for first_token in (100, 300):
        earlier = bench.add(2 * BLOCK_TOKENS, 1, first_token=first_token)
        commit(bench.plan(), bench.waiting, bench.running, bench.pool)
        for block, identity in zip(earlier.blocks, earlier.chain.blocks(2), strict=True):
            bench.pool.identify(block, identity)
        bench.running.remove(earlier)
        release_blocks(earlier, bench.pool)
    # Five new blocks are needed and three are free: two cached ones go, and the oldest are those to be reused.
    bench.add(4 * BLOCK_TOKENS, 1, first_token=900)
    again = bench.add(2 * BLOCK_TOKENS + 4, 1, first_token=100)
    chain = again.chain.reusable()
    plan = bench.plan()
    assert {admission.sequence: len(admission.reused) for admission in plan.admitted}[again] == 2
    commit(plan, bench.waiting, bench.running, bench.pool)
    assert bench.pool.match(chain) == tuple(again.blocks[:2])
    assert bench.pool.owned == 7


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request() -> None:
    bench = Bench(10, tokens=512)
    bench.add(100, 30)
    bench.step()
    big, small = bench.add(100, 2, arrival_s=1.0), bench.add(4, 2, arrival_s=2.0)
    while big not in bench.finished:
        bench.step()
        assert small not in bench.finished or big in bench.finished


def test_a_queue_keeps_order_and_membership_under_random_use() -> None:
    dice = random.Random(3)
    bench = Bench(1)
    kept: list[Sequence] = []
    for _ in range(300):
        if kept and dice.random() < 0.4:
            gone = kept.pop(dice.randrange(len(kept)))
            bench.waiting.remove(gone)
            assert gone not in bench.waiting
        else:
            kept.append(bench.add(1, 1, arrival_s=dice.random() * 10, priority=dice.randrange(3)))
        bench.waiting.check_integrity()
        assert list(bench.waiting) == sorted(kept, key=lambda sequence: sequence.rank)
    with pytest.raises(IntegrityError):
        bench.waiting.remove(Bench(1).add(1, 1))
