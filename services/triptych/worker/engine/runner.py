"""Executes a plan: gathers its tokens' embeddings, runs a step, chooses tokens where logits are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import IntegrityError
from triptych.worker.engine.choosing import Chosen, Wanted, choose, confirm
from triptych.worker.engine.logprobs import TokenLogprobs
from triptych.worker.engine.scheduler import Chunk, StepPlan
from triptych.worker.engine.sequence import Sequence as Running
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.step import SequenceRows, StepBackend, StepResult

# torch computes this many elements in the calling thread (at::internal::GRAIN_SIZE).
_SERIAL_ELEMENTS = 32768


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one sequence.

    Attributes:
        tokens: The next token, and further ones where guesses came true; none when prefill is not complete yet.
        finite: Whether the model's numbers are; if not, the tokens are meaningless.
        logprobs: For each token how likely it was; None unless the request asks.
    """

    tokens: tuple[int, ...]
    finite: bool
    logprobs: tuple[TokenLogprobs | None, ...]


class Runner:
    """From plans to tokens.

    Attributes:
        config: The decoder's shape.
        device: Where it computes.
        cache: The paged cache that `backend` reads and writes.
        backend: What computes steps.
    """

    def __init__(self, config: DecoderConfig, embedding: Tensor, cache: KVCache, backend: StepBackend) -> None:
        """`embedding` is [vocabulary, hidden], on the device."""
        self.config = config
        self.device = embedding.device
        self.cache = cache
        self.backend = backend
        self._embedding = embedding

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Callable[[], list[Outcome]]:
        """Begins to compute a plan's tokens.

        Returns a function that waits for them and gives one outcome for each of `plan.sequences()`, in that order.
        """
        rows = _rows(plan)
        wanted = [
            Wanted(row.logits, sequence.chooser, guess)
            for row, sequence, guess in zip(rows, plan.sequences(), _guesses(plan), strict=True)
        ]
        # A large vocabulary's logits are worth leaving where they are when all that is wanted is the largest one.
        greedy = all(each.chooser.takes_largest for each in wanted if each.rows)
        finish = self.backend.start(self._embed(plan), rows, logits=not greedy, greedy=greedy)
        return lambda: _outcomes(finish(), wanted)

    def embed(self, token_ids: list[int] | tuple[int, ...]) -> Tensor:
        """Returns the embeddings of tokens, [tokens, hidden], as the backend takes them."""
        return gather(self._embedding, list(token_ids), self.backend.input_dtype)

    def _embed(self, plan: StepPlan) -> Tensor:
        """Returns the embeddings of all rows, decodes first, with images' features in their places."""
        token_ids: list[int] = []
        for sequence, guess in zip(plan.decodes, plan.guesses, strict=True):
            token_ids += (sequence.token_ids[-1], *guess)
        row = len(token_ids)
        for chunk in plan.chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        embedded = self.embed(token_ids)
        for chunk in plan.chunks:
            for position, features in _features(chunk):
                first = row + position - chunk.start
                embedded[first : first + len(features)] = features
            row += chunk.tokens
        return embedded


def gather(table: Tensor, rows: list[int], dtype: torch.dtype) -> Tensor:
    """Returns rows of a table [rows, width] as another element type.

    On CPU in pieces below the size from which torch calls its threads: these sleep between steps, and where other
    programs run, waking them for so little may take longer than a small step does.
    """
    if table.device.type != "cpu":
        return table[torch.tensor(rows, device=table.device)].to(dtype)
    found = torch.empty(len(rows), table.shape[1], dtype=dtype)
    piece = max(1, _SERIAL_ELEMENTS // table.shape[1])
    for first in range(0, len(rows), piece):
        found[first : first + piece] = table[torch.tensor(rows[first : first + piece])]
    return found


@torch.inference_mode()
def _outcomes(result: StepResult, wanted: Sequence[Wanted]) -> list[Outcome]:
    chosen: list[Chosen] = [((), ())] * len(wanted)
    if result.greedy is not None:
        chosen = confirm(result.greedy.tolist(), wanted)
    elif result.logits is not None:
        chosen = choose(result.logits, wanted)
    return [
        Outcome(tokens, finite, logprobs)
        for (tokens, logprobs), finite in zip(chosen, result.finite.tolist(), strict=True)
    ]


def _rows(plan: StepPlan) -> list[SequenceRows]:
    decodes = [
        _decode_rows(sequence, 1 + len(guess)) for sequence, guess in zip(plan.decodes, plan.guesses, strict=True)
    ]
    chunks = [
        SequenceRows(chunk.tokens, chunk.end, int(chunk.completes), chunk.sequence.blocks) for chunk in plan.chunks
    ]
    return decodes + chunks


def _decode_rows(sequence: Running, rows: int) -> SequenceRows:
    """Describes the last known token and the guesses behind it."""
    context = len(sequence.token_ids) + rows - 1
    if sequence.aside is None:
        return SequenceRows(rows, context, rows, sequence.blocks)
    skipped = sequence.aside.removed * BLOCK_TOKENS
    return SequenceRows(rows, context - skipped, rows, sequence.blocks, skipped, sequence.aside.segment)


def _guesses(plan: StepPlan) -> list[tuple[int, ...]]:
    return [*plan.guesses, *[()] * len(plan.chunks)]


def _features(chunk: Chunk) -> list[tuple[int, Tensor]]:
    features = chunk.sequence.features_between(chunk.start, chunk.end)
    visual_tokens = chunk.sequence.visual_tokens_between(chunk.start, chunk.end)
    if sum(len(rows) for _, rows in features) != visual_tokens:
        raise IntegrityError("a step would compute an image without its features")
    return features
