"""Whether KV is better loaded from a tier or computed again, from what both took so far."""

from triptych.worker.kv.identity import BLOCK_TOKENS

_WEIGHT = 0.2  # Of a new measurement in the running averages.
_TRIES_AFTER = 16  # After so many decisions against a tier, it is tried once more: it may have become faster.


class CostModel:
    """Running averages of seconds per prefilled token, and of seconds per block loaded from each tier.

    Both costs grow with the tokens, so the decision does not depend on how many there are. What was never measured is
    tried. Not thread-safe in the strict sense; a lost measurement does no harm.
    """

    def __init__(self) -> None:
        self._prefill_token_s: float | None = None
        self._load_block_s: dict[str, float] = {}
        self._refusals: dict[str, int] = {}

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Takes the measurement of a step that mainly prefilled."""
        self._prefill_token_s = _average(self._prefill_token_s, seconds / tokens)

    def note_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Takes the measurement of a load from a tier."""
        self._load_block_s[tier] = _average(self._load_block_s.get(tier), seconds / blocks)

    def pays(self, tier: str) -> bool:
        """Tells whether loading a block from a tier is cheaper than prefilling its tokens."""
        load_s, prefill_s = self._load_block_s.get(tier), self._prefill_token_s
        if load_s is None or prefill_s is None or load_s < prefill_s * BLOCK_TOKENS:
            self._refusals[tier] = 0
            return True
        self._refusals[tier] = (self._refusals.get(tier, 0) + 1) % _TRIES_AFTER
        return self._refusals[tier] == 0

    def figures(self) -> dict[str, float]:
        """Returns the averages, in seconds: `prefill` for a block's tokens, and for a block from each tier."""
        measured = dict(self._load_block_s)
        if self._prefill_token_s is not None:
            measured["prefill"] = self._prefill_token_s * BLOCK_TOKENS
        return measured


def _average(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
