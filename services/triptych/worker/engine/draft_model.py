"""A small model guesses what a large one will say, so that one step can check several tokens.

Speculative decoding after Leviathan et al. (arXiv:2211.17192), with guesses that are always the small model's most
likely tokens. A guess is kept where it is exactly what the large model chose, its noise included, so answers stay the
same, token for token, greedy or sampled.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.errors import IntegrityError
from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.runner import gather
from triptych.worker.engine.scheduler import most_guesses
from triptych.worker.engine.sequence import Phase, Sequence
from triptych.worker.engine.speculation import Proposal
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.cache import KVCache
from triptych.worker.model.step import SequenceRows, StepBackend, StepResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Draft:
    """One sequence as the draft model sees it: its text, without its images.

    Attributes:
        ids: Known tokens.
        seen: Tokens of the sequence, images included, that `ids` covers.
        computed: Leading ids whose KV is in `blocks`.
        blocks: The block table.
        guess: Tokens guessed to follow; the KV of all but the last is in `blocks` too.
        wanted: How many to guess in this round.
        rows: How many rows to compute in its next step.
        broken: Its numbers are not finite; nothing is guessed any more.
    """

    ids: list[int]
    seen: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    wanted: int = 0
    rows: int = 0
    broken: bool = False


class DraftModel:
    """Guesses for all sequences that decode, batched. It holds KV of its own, in a pool of its own.

    It does without what it lacks: images, room in its pool, a longer context. Then fewer tokens are guessed, or none.
    When it fails it is not asked again. Only the engine's thread calls it.
    """

    def __init__(
        self,
        embedding: Tensor,
        cache: KVCache,
        pool: BlockPool,
        backend: StepBackend,
        *,
        context_tokens: int,
        step_tokens: int,
        never: int | None,
    ) -> None:
        """Takes a loaded model.

        Args:
            embedding: [vocabulary, hidden].
            cache: The paged cache that `backend` reads and writes.
            pool: Who holds which of its blocks.
            backend: What computes steps.
            context_tokens: Most positions the model was made for.
            step_tokens: Most known tokens computed in one round; a long prompt takes several.
            never: A token that ends a guess: the image token, whose positions mean something else.
        """
        self._embedding = embedding
        self._cache = cache
        self._pool = pool
        self._backend = backend
        self._context_tokens = context_tokens
        self._step_tokens = step_tokens
        self._never = never
        self._drafts: dict[Sequence, _Draft] = {}
        self._failed = False

    @torch.inference_mode()
    def propose(self, running: Iterable[Sequence], budget: TokenBudget) -> None:
        """Gives each sequence that decodes a `guesser` that knows what may follow where it stands now."""
        if self._failed:
            return
        working: dict[Sequence, _Draft] = {}
        room = self._step_tokens
        for sequence in running:
            if sequence.phase is not Phase.DECODE:
                continue
            draft = self._follow(sequence)
            draft.wanted = min(most_guesses(sequence, budget), self._context_tokens - len(draft.ids))
            draft.rows = min(len(draft.ids) - draft.computed, room)
            if draft.wanted > 0 and draft.rows > 0 and not draft.broken and self._reserve(draft):
                working[sequence] = draft
                room -= draft.rows
        try:
            self._guess(list(working.values()))
        except Exception:
            log.exception("the draft model failed and is not asked again; answers come without guesses")
            self._failed = True
            for sequence in list(self._drafts):
                self.forget(sequence)
            return
        for sequence, draft in working.items():
            guess = draft.guess
            cut = guess.index(self._never) if self._never in guess else len(guess)
            sequence.guesser = Proposal(len(sequence.token_ids), tuple(guess[:cut]))

    def forget(self, sequence: Sequence) -> None:
        """Frees what is held for a sequence."""
        draft = self._drafts.pop(sequence, None)
        if draft is not None:
            self._pool.release(draft.blocks)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raises IntegrityError unless all blocks are free but those held for some of `sequences`."""
        self._pool.check_integrity()
        held = Counter(block for draft in self._drafts.values() for block in draft.blocks)
        if not self._drafts.keys() <= set(sequences) or len(held) != self._pool.owned or set(held.values()) - {1}:
            raise IntegrityError("the draft model's blocks and the sequences it follows differ")

    def _follow(self, sequence: Sequence) -> _Draft:
        """Returns a sequence's draft, with the tokens that are new; KV of guesses that came true stays."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = _Draft(_text_of(sequence), len(sequence.token_ids))
            sequence.guesser = Proposal()
        new = sequence.token_ids[draft.seen :]
        for token, guess in zip(new, draft.guess[:-1], strict=False):
            if token != guess:
                break
            draft.computed += 1
        draft.ids += new
        draft.seen += len(new)
        draft.guess = []
        return draft

    def _reserve(self, draft: _Draft) -> bool:
        """Takes the blocks that this round will write to, if there are enough."""
        needed = blocks_for(len(draft.ids) + draft.wanted - 1) - len(draft.blocks)
        if needed > self._pool.available:
            return False
        draft.blocks += (self._pool.allocate() for _ in range(needed))
        return True

    def _guess(self, drafts: list[_Draft]) -> None:
        """Computes what is known and not computed; where that is all, guesses one token of each draft after another."""
        drafts = sorted(drafts, key=lambda draft: draft.rows)  # Backends want single rows first.
        while drafts:
            result = self._step(drafts)
            for draft in drafts:
                draft.computed = min(draft.computed + draft.rows, len(draft.ids))
            tokens = iter(result.greedy.tolist() if result.greedy is not None else ())
            going_on: list[_Draft] = []
            for draft, finite in zip(drafts, result.finite.tolist(), strict=True):
                if draft.computed < len(draft.ids):
                    continue
                token = next(tokens)
                if not finite:
                    self._cache.wipe(draft.blocks)
                    draft.broken, draft.guess = True, []
                    continue
                draft.guess.append(token)
                draft.rows = 1
                if len(draft.guess) < draft.wanted:
                    going_on.append(draft)
            drafts = going_on

    def _step(self, drafts: Items[_Draft]) -> StepResult:
        """Runs one step over the next rows of each draft: known ids, or the last guess."""
        rows: list[SequenceRows] = []
        ids: list[int] = []
        for draft in drafts:
            if draft.guess:
                ids.append(draft.guess[-1])
                rows.append(SequenceRows(1, len(draft.ids) + len(draft.guess), 1, draft.blocks))
            else:
                end = draft.computed + draft.rows
                ids += draft.ids[draft.computed : end]
                rows.append(SequenceRows(draft.rows, end, int(end == len(draft.ids)), draft.blocks))
        embedded = gather(self._embedding, ids, self._backend.input_dtype)
        return self._backend.start(embedded, rows, logits=False, greedy=True)()


def _text_of(sequence: Sequence) -> list[int]:
    """Returns a sequence's tokens without those that stand for images."""
    ids: list[int] = []
    start = 0
    for span in sequence.request.prompt.spans:
        ids += sequence.token_ids[start : span.start]
        start = span.end
    return ids + sequence.token_ids[start:]
