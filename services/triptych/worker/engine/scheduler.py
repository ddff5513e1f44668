"""Chooses what the next step computes. Planning is pure; `commit` makes a plan true."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.sequence import Phase, Sequence
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS

# After so many admissions that were not its own, nobody passes the first sequence in turn any more.
_MOST_OVERTAKEN = 64


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a cached block, up to the end of an image.

    Attributes:
        block: The block; its positions behind may belong to another prompt.
        tokens: How many positions of it can be reused, by copying them.
    """

    block: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that starts to run.

    Attributes:
        sequence: The sequence.
        reused: Blocks of the prefix cache that its table begins with, pinned ones included.
        part: What is copied from the cache to the block behind these; None where there is nothing.
        computed: Positions whose KV it has then.
    """

    sequence: Sequence
    reused: tuple[int, ...]
    part: Part | None
    computed: int


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


def plan_step(
    waiting: AgingQueue,
    running: AgingQueue,
    budget: TokenBudget,
    pool: BlockPool,
    is_loading: Callable[[Sequence], bool] = lambda sequence: False,
) -> StepPlan:
    """Chooses the next step's work: every decode first, then prefill chunks in order of rank while the budget lasts.

    An admitted sequence gets blocks for all its known tokens at once, so only decodes need blocks later. When one
    finds none, the running sequence of the lowest rank is preempted; the one of the highest rank therefore always
    gets on, and with it everything else in turn. A sequence whose KV is on its way up (`is_loading`) waits for it.
    Running sequences leave a reserve of the pool to text where they are visual, and the other way round; who waits for
    that reason may be passed by others, but not for ever.

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
    planned = {True: 0, False: 0}  # Blocks for those admitted, by whether visual.
    candidates = iter(waiting) if not preempted else iter(())
    for sequence in candidates:
        if not room or len(running) + len(admitted) >= budget.sequences:
            break
        if is_loading(sequence):
            continue
        admission = _admission(sequence, pool)
        used = {*admission.reused, *([admission.part.block] if admission.part else ())}
        revived = sum(pool.references(block) == 0 for block in used - taken)
        cost = blocks_for(len(sequence.token_ids)) - len(admission.reused) + revived
        if cost > available:
            if running or admitted:
                break
            # Nothing runs, so what is missing is pinned by sequences further back: let those through.
            continue
        visual = sum(map(sequence.is_visual_block, range(len(admission.reused), blocks_for(len(sequence.token_ids)))))
        grown = {True: planned[True] + visual, False: planned[False] + cost - visual}
        if (running or admitted) and not all(pool.leaves_reserve(kind, count) for kind, count in grown.items()):
            if sequence.overtaken >= _MOST_OVERTAKEN:
                break
            continue
        planned = grown
        available -= cost
        taken |= used
        admitted.append(admission)
        start = admission.computed
        chunks.append(Chunk(sequence, start, min(room, len(sequence.token_ids) - start)))
        room -= chunks[-1].tokens
    guesses = []
    for sequence in decodes:
        guesses.append(sequence.guesser.guess(sequence.token_ids, min(room, most_guesses(sequence, budget))))
        room -= len(guesses[-1])
    return StepPlan(tuple(preempted), tuple(admitted), tuple(decodes), tuple(chunks), tuple(guesses))


def _admission(sequence: Sequence, pool: BlockPool) -> Admission:
    """Returns how a sequence would start now: with what the cache holds of it."""
    if sequence.holds_part:
        return Admission(sequence, tuple(sequence.blocks), None, sequence.computed)
    reused = (*sequence.blocks, *pool.match(sequence.chain.reusable())[len(sequence.blocks) :])
    computed = len(reused) * BLOCK_TOKENS
    for identity in sequence.chain.parts(len(reused)):
        found = pool.match((identity,))
        if found:
            return Admission(sequence, reused, Part(found[0], identity.tokens), computed + identity.tokens)
    return Admission(sequence, reused, None, computed)


def most_guesses(sequence: Sequence, budget: TokenBudget) -> int:
    """Returns how many guesses fit into the block of the last token, and may still be generated behind the next."""
    # A repetition penalty depends on each token before; a sequence with visual KV set aside takes one row.
    if sequence.chooser.seen is not None or sequence.aside is not None:
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
        needed = sequence.missing_blocks
        while needed > available and sequence not in preempted:
            victim = next(victims)
            preempted.append(victim)
            dropped.update(victim.releasable_blocks)
            available += sum(pool.references(block) == dropped[block] for block in victim.releasable_blocks)
        if sequence not in preempted:
            available -= needed
            decodes.append(sequence)
    return decodes, preempted, available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Positions to copy within the cache before a step: the first `tokens` of block `source` to block `target`."""

    source: int
    target: int
    tokens: int


def commit(plan: StepPlan, waiting: AgingQueue, running: AgingQueue, pool: BlockPool) -> list[BlockCopy]:
    """Moves sequences between the queues and gives them their blocks, as planned.

    Returns what is to be copied before anything else changes the pool or the cache.
    """
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
        if admission.part is not None:
            pool.acquire(admission.part.block)
    for admission in plan.admitted:
        sequence = admission.sequence
        waiting.remove(sequence)
        sequence.computed = admission.computed
        sequence.identified = min(len(admission.reused), admission.computed // BLOCK_TOKENS)
        sequence.phase = Phase.PREFILL
        running.add(sequence)
    if plan.admitted:
        last = max(admission.sequence.rank for admission in plan.admitted)
        for sequence in waiting:
            sequence.overtaken += sequence.rank < last
    for sequence in plan.sequences():
        while sequence.missing_blocks > 0:
            place = len(sequence.blocks) + sequence.removed_blocks
            sequence.blocks.append(pool.allocate(sequence.is_visual_block(place)))
    copies: list[BlockCopy] = []
    for admission in plan.admitted:
        if admission.part is not None:
            target = admission.sequence.blocks[len(admission.reused)]
            copies.append(BlockCopy(admission.part.block, target, admission.part.tokens))
            pool.release([admission.part.block])
    return copies


def release_blocks(sequence: Sequence, pool: BlockPool, keep: int = 0) -> None:
    """Gives back all blocks of a sequence but the first `keep`, and forgets that they were computed."""
    if sequence.aside is not None:
        sequence.aside.release()
        sequence.aside = None
    pool.release(sequence.blocks[keep:])
    del sequence.blocks[keep:]
    sequence.computed = min(sequence.computed, keep * BLOCK_TOKENS)
    sequence.identified = min(sequence.identified, keep)
