"""The chain of block identities of one sequence, hashed as far as it is asked for."""

from collections.abc import Sequence

from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity, VisualSpan, identify_block, root_key


class Chain:
    """Identities of a sequence's blocks, and of their first positions where an image ends within a block.

    The latter make an image reusable as a whole whatever text comes behind it.

    Attributes:
        part_indices: Indices of the blocks within which an image ends, ascending.
    """

    def __init__(self, token_ids: Sequence[int], spans: Sequence[VisualSpan], cache_salt: str) -> None:
        """`token_ids` may grow afterwards."""
        self._token_ids, self._spans = token_ids, spans
        self._root = root_key(cache_salt)
        self._blocks: list[BlockIdentity] = []
        self.part_indices = tuple(sorted({span.end // BLOCK_TOKENS for span in spans if span.end % BLOCK_TOKENS}))

    def blocks(self, count: int) -> list[BlockIdentity]:
        """Returns the identities of the first `count` blocks, which must be full of known tokens."""
        while len(self._blocks) < count:
            start = len(self._blocks) * BLOCK_TOKENS
            self._blocks.append(identify_block(self._parent(), self._token_ids, self._spans, start))
        return self._blocks[:count]

    def reusable(self) -> list[BlockIdentity]:
        """Returns the identities of all blocks that may be reused; at least one token is left to compute."""
        return self.blocks((len(self._token_ids) - 1) // BLOCK_TOKENS)

    def parts(self, index: int) -> list[BlockIdentity]:
        """Returns the identities of the reusable beginnings of a block with which an image ends, longest first."""
        start = index * BLOCK_TOKENS
        ends = {span.end for span in self._spans}
        tokens = [end - start for end in sorted(ends, reverse=True) if start < end < start + BLOCK_TOKENS]
        if not tokens or start >= len(self._token_ids):
            return []
        parent = self.blocks(index)[-1].key if index else self._root
        known = len(self._token_ids) - start
        return [identify_block(parent, self._token_ids, self._spans, start, n) for n in tokens if n < known]

    def _parent(self) -> bytes:
        return self._blocks[-1].key if self._blocks else self._root
