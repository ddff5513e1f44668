"""Executes a plan: gathers its tokens' embeddings, runs a step, chooses tokens where logits are needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import IntegrityError
from triptych.worker.engine.choosing import Chosen, Wanted, choose, confirm
from triptych.worker.engine.logprobs import TokenLogprobs
from triptych.worker.engine.scheduler import Chunk, StepPlan
from triptych.worker.kv.cache import KVCache
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.step import SequenceRows, StepBackend


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
        """`embedding` is [vocabulary, hidden], on the device and in the type of the backend's input."""
        self.config = config
        self.device = embedding.device
        self.cache = cache
        self.backend = backend
        self._embedding = embedding

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Outcome]:
        """Computes a plan's tokens. Returns one outcome for each of `plan.sequences()`, in that order."""
        rows = _rows(plan)
        wanted = [
            Wanted(row.logits, sequence.chooser, guess)
            for row, sequence, guess in zip(rows, plan.sequences(), _guesses(plan), strict=True)
        ]
        # A large vocabulary's logits are worth leaving where they are when all that is wanted is the largest one.
        greedy = all(each.chooser.takes_largest for each in wanted if each.rows)
        result = self.backend.step(self._embed(plan), rows, logits=not greedy, greedy=greedy)
        chosen: list[Chosen] = [((), ())] * len(rows)
        if result.greedy is not None:
            chosen = confirm(result.greedy.tolist(), wanted)
        elif result.logits is not None:
            chosen = choose(result.logits, wanted)
        return [
            Outcome(tokens, finite, logprobs)
            for (tokens, logprobs), finite in zip(chosen, result.finite.tolist(), strict=True)
        ]

    def _embed(self, plan: StepPlan) -> Tensor:
        """Returns the embeddings of all rows, decodes first, with images' features in their places."""
        token_ids: list[int] = []
        for sequence, guess in zip(plan.decodes, plan.guesses, strict=True):
            token_ids += (sequence.token_ids[-1], *guess)
        row = len(token_ids)
        for chunk in plan.chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        embedded = self._embedding[torch.tensor(token_ids, device=self.device)]
        for chunk in plan.chunks:
            for position, features in _features(chunk):
                first = row + position - chunk.start
                embedded[first : first + len(features)] = features
            row += chunk.tokens
        return embedded


def _rows(plan: StepPlan) -> list[SequenceRows]:
    decodes = [
        SequenceRows(1 + len(guess), len(sequence.token_ids) + len(guess), 1 + len(guess), sequence.blocks)
        for sequence, guess in zip(plan.decodes, plan.guesses, strict=True)
    ]
    chunks = [
        SequenceRows(chunk.tokens, chunk.end, int(chunk.completes), chunk.sequence.blocks) for chunk in plan.chunks
    ]
    return decodes + chunks


def _guesses(plan: StepPlan) -> list[tuple[int, ...]]:
    return [*plan.guesses, *[()] * len(plan.chunks)]


def _features(chunk: Chunk) -> list[tuple[int, Tensor]]:
    features = chunk.sequence.features_between(chunk.start, chunk.end)
    visual_tokens = chunk.sequence.visual_tokens_between(chunk.start, chunk.end)
    if sum(len(rows) for _, rows in features) != visual_tokens:
        raise IntegrityError("a step would compute an image without its features")
    return features
