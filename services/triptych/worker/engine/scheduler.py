"""Chooses what the next step computes. Planning is pure; `commit` makes a plan true."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.sequence import Phase, Sequence
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that starts to run.

    Attributes:
        sequence: The sequence.
        reused: Blocks of the prefix cache that its table begins with, pinned ones included.
    """

    sequence: Sequence
    reused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill work.

    Attributes:
        sequence: The sequence.
        start: First position to compute.
        tokens: How many; > 0.
    """

    sequence: Sequence
    start: int
    tokens: int

    @property
    def end(self) -> int:
        """First position behind the chunk."""
        return self.start + self.tokens

    @property
    def completes(self) -> bool:
        """Whether it computes the sequence's last known token, whose logits give the next one."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step will run.

    Attributes:
        preempted: Running sequences that go back to waiting, because blocks ran out.
        admitted: Waiting sequences that begin to run; each has a chunk.
        decodes: Sequences that compute and produce one token each, or more where guesses come true.
        chunks: Prefill work.
        guesses: For each decode, tokens that may follow, to be checked in the same step.
    """

    preempted: tuple[Sequence, ...]
    admitted: tuple[Admission, ...]
    decodes: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    guesses: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.decodes) + sum(map(len, self.guesses)) + sum(chunk.tokens for chunk in self.chunks)

    def sequences(self) -> Iterator[Sequence]:
        """Iterates over the sequences that take part, decodes first: the order of the step's results."""
        yield from self.decodes
        for chunk in self.chunks:
            yield chunk.sequence


def plan_step(waiting: AgingQueue, running: AgingQueue, budget: TokenBudget, pool: BlockPool) -> StepPlan:
    """Chooses the next step's work: every decode first, then prefill chunks in order of rank while the budget lasts.

    An admitted sequence gets blocks for all its known tokens at once, so only decodes need blocks later. When one
    finds none, the running sequence of the lowest rank is preempted; the one of the highest rank therefore always
    gets on, and with it everything else in turn.

    What is left of the budget goes to guesses. Pure: it changes neither queues nor pool, and of sequences only what
    their guessers remember.
    """
    decodes, preempted, available = _plan_decodes(running, pool)
    room = budget.tokens - len(decodes)
    chunks: list[Chunk] = []
    for sequence in running:
        if room and sequence.phase is Phase.PREFILL and sequence not in preempted:
            chunks.append(Chunk(sequence, sequence.computed, min(room, sequence.pending)))
            room -= chunks[-1].tokens
    # Blocks are contested while there are preemptions: nobody new comes in.
    admitted: list[Admission] = []
    taken: set[int] = set()
    candidates = iter(waiting) if not preempted else iter(())
    for sequence in candidates:
        if not room or len(running) + len(admitted) >= budget.sequences:
            break
        reused = (*sequence.blocks, *pool.match(sequence.reusable_chain())[len(sequence.blocks) :])
        revived = sum(pool.references(block) == 0 for block in set(reused) - taken)
        cost = blocks_for(len(sequence.token_ids)) - len(reused) + revived
        if cost > available:
            if running or admitted:
                break
            # Nothing runs, so what is missing is pinned by sequences further back: let those through.
            continue
        available -= cost
        taken.update(reused)
        admitted.append(Admission(sequence, reused))
        start = len(reused) * BLOCK_TOKENS
        chunks.append(Chunk(sequence, start, min(room, len(sequence.token_ids) - start)))
        room -= chunks[-1].tokens
    guesses = []
    for sequence in decodes:
        guesses.append(sequence.guesser.guess(sequence.token_ids, min(room, most_guesses(sequence, budget))))
        room -= len(guesses[-1])
    return StepPlan(tuple(preempted), tuple(admitted), tuple(decodes), tuple(chunks), tuple(guesses))


def most_guesses(sequence: Sequence, budget: TokenBudget) -> int:
    """Returns how many guesses fit into the block of the last token, and may still be generated behind the next."""
    if sequence.chooser.seen is not None:  # A repetition penalty depends on each token before.
        return 0
    known = len(sequence.token_ids)
    return max(0, min(budget.guesses, blocks_for(known) * BLOCK_TOKENS - known, sequence.most_tokens - known - 1))


def _plan_decodes(running: AgingQueue, pool: BlockPool) -> tuple[list[Sequence], list[Sequence], int]:
    """Returns the decodes, the sequences preempted for them, and how many blocks are then available."""
    available = pool.available
    decodes: list[Sequence] = []
    preempted: list[Sequence] = []
    dropped: Counter[int] = Counter()  # References that the preempted give back.
    victims = reversed(running)
    for sequence in running:
        if sequence.phase is not Phase.DECODE or sequence in preempted:
            continue
        needed = blocks_for(len(sequence.token_ids)) - len(sequence.blocks)
        while needed > available and sequence not in preempted:
            victim = next(victims)
            preempted.append(victim)
            dropped.update(victim.blocks[victim.pinned :])
            available += sum(pool.references(block) == dropped[block] for block in victim.blocks[victim.pinned :])
        if sequence not in preempted:
            available -= needed
            decodes.append(sequence)
    return decodes, preempted, available


def commit(plan: StepPlan, waiting: AgingQueue, running: AgingQueue, pool: BlockPool) -> None:
    """Moves sequences between the queues and gives them their blocks, as planned."""
    for sequence in plan.preempted:
        running.remove(sequence)
        release_blocks(sequence, pool, keep=sequence.pinned)
        sequence.phase = Phase.WAITING
        waiting.add(sequence)
    # All references before all allocations: an allocation may evict what another admission reuses.
    for admission in plan.admitted:
        sequence = admission.sequence
        for block in admission.reused[len(sequence.blocks) :]:
            pool.acquire(block)
            sequence.blocks.append(block)
    for admission in plan.admitted:
        sequence = admission.sequence
        waiting.remove(sequence)
        sequence.computed = len(admission.reused) * BLOCK_TOKENS
        sequence.identified = len(admission.reused)
        sequence.phase = Phase.PREFILL
        running.add(sequence)
    for sequence in plan.sequences():
        while len(sequence.blocks) < blocks_for(len(sequence.token_ids)):
            sequence.blocks.append(pool.allocate())


def release_blocks(sequence: Sequence, pool: BlockPool, keep: int = 0) -> None:
    """Gives back all blocks of a sequence but the first `keep`, and forgets that they were computed."""
    pool.release(sequence.blocks[keep:])
    del sequence.blocks[keep:]
    sequence.computed = min(sequence.computed, keep * BLOCK_TOKENS)
    sequence.identified = min(sequence.identified, keep)
