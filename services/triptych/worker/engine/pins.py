"""Blocks that may not be given back, because their images came without features and cannot be computed again."""

from collections import Counter
from collections.abc import Iterable

from triptych.errors import FeaturesRequired, IntegrityError
from triptych.worker.engine.sequence import Sequence
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS


class Pins:
    """Counts pinned blocks, and refuses new ones where they could stop somebody for ever.

    Preemption cannot take pinned blocks, so a sequence can count on only the rest of the pool. As long as every
    sequence fits into that rest, one can always finish. A refusal costs little: the caller sends the features.
    """

    def __init__(self, pool_size: int) -> None:
        self._pool_size = pool_size
        self._holders: Counter[int] = Counter()

    def pin(self, sequence: Sequence, pool: BlockPool, others: Iterable[Sequence]) -> None:
        """Takes the blocks of a new sequence's images that came without features. Raises FeaturesRequired."""
        request = sequence.request
        spans = zip(request.prompt.spans, request.features, strict=True)
        needed = max((span.end for span, features in spans if features is None), default=0)
        if not needed:
            return
        blocks = pool.match(sequence.reusable_chain())[: blocks_for(needed)]
        if len(blocks) * BLOCK_TOKENS < needed:
            raise FeaturesRequired("the KV of an image without features is not cached; send the request with features")
        if not self.can_add(blocks, (*others, sequence)):
            raise FeaturesRequired("too little KV memory to hold an image without features; send it with features")
        for block in blocks:
            pool.acquire(block)
        self.add(blocks)
        sequence.blocks = list(blocks)
        sequence.pinned = sequence.identified = len(blocks)
        sequence.computed = len(blocks) * BLOCK_TOKENS

    def can_add(self, blocks: Iterable[int], sequences: Iterable[Sequence]) -> bool:
        """Tells whether `blocks` may be pinned while `sequences`, the new one included, have to finish."""
        pinned = len(self._holders.keys() | set(blocks))
        return pinned + max(blocks_for(sequence.most_tokens) for sequence in sequences) <= self._pool_size

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
