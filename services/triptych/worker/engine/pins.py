"""Blocks that may not be given back, because their images came without features and cannot be computed again."""

from collections import Counter
from collections.abc import Collection, Iterable

from triptych.errors import FeaturesRequired, IntegrityError
from triptych.worker.engine.scheduler import BlockCopy
from triptych.worker.engine.sequence import Sequence
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS


def needed_positions(sequence: Sequence) -> int:
    """Returns how many leading positions of a sequence hold images that came without features."""
    request = sequence.request
    spans = zip(request.prompt.spans, request.features, strict=True)
    return max((span.end for span, features in spans if features is None), default=0)


class Pins:
    """Counts pinned blocks, and refuses new ones where they could stop somebody for ever.

    Preemption cannot take pinned blocks, so a sequence can count on only the rest of the pool. As long as every
    sequence fits into that rest, one can always finish. A refusal costs little: the caller sends the features.
    """

    def __init__(self, pool_size: int) -> None:
        self._pool_size = pool_size
        self._holders: Counter[int] = Counter()

    def pin(self, sequence: Sequence, pool: BlockPool, others: Iterable[Sequence]) -> BlockCopy | None:
        """Takes the blocks of a waiting sequence's images that came without features.

        Returns what is to be copied at once, where the last of these images ends within a block. Raises
        FeaturesRequired.
        """
        needed = needed_positions(sequence)
        if not needed:
            return None
        blocks = list(pool.match(sequence.chain.reusable())[: blocks_for(needed)])
        computed = len(blocks) * BLOCK_TOKENS
        part = None
        if computed < needed:
            parts = sequence.chain.parts(len(blocks)) if len(blocks) == needed // BLOCK_TOKENS else []
            found = pool.match(one for one in parts if computed + one.tokens == needed)
            if not found:
                raise FeaturesRequired(
                    "the KV of an image without features is not cached; send the request with features"
                )
            part = found[0]
        # A copy of a part takes a block of its own, which can be any that is available now.
        if not self.can_add(blocks, sequence, others, 1 if part is not None else 0):
            raise FeaturesRequired("too little KV memory to hold an image without features; send it with features")
        for block in (*blocks, *([part] if part is not None else ())):
            pool.acquire(block)
        copy = None
        if part is not None:
            if not pool.available:
                pool.release([*blocks, part])
                raise FeaturesRequired("no KV memory is free for an image without features; send it with features")
            blocks.append(pool.allocate(visual=True))
            copy = BlockCopy(part, blocks[-1], needed - computed)
            pool.release([part])
            computed = needed
        self.add(blocks)
        sequence.blocks = blocks
        sequence.pinned = len(blocks)
        sequence.computed = computed
        sequence.identified = computed // BLOCK_TOKENS
        return copy

    def can_add(self, blocks: Collection[int], sequence: Sequence, others: Iterable[Sequence], more: int = 0) -> bool:
        """Tells whether a sequence may pin `blocks`, and `more`, while it and the others have to finish.

        Blocks on their way up that will be pinned count as pinned. What a sequence has pinned itself it need not find
        in the rest.
        """
        own_blocks = {sequence: len(set(blocks)) + more + blocks_for(sequence.needs)}
        own_blocks |= {other: max(other.pinned, blocks_for(other.needs)) for other in others}
        coming = sum(blocks_for(one.needs) for one in own_blocks)
        pinned = len(self._holders.keys() | set(blocks)) + more + coming
        return pinned + max(blocks_for(one.most_tokens) - own for one, own in own_blocks.items()) <= self._pool_size

    def add(self, blocks: Iterable[int]) -> None:
        """Pins blocks once more."""
        self._holders.update(blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Takes back one `add`."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError unless exactly the pinned blocks of `sequences` are counted."""
        if self._holders != Counter(block for s in sequences for block in s.blocks[: s.pinned]):
            raise IntegrityError("the count of pinned blocks is wrong")
