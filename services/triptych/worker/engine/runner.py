"""Executes a plan: gathers its tokens' embeddings, runs a step, chooses tokens where logits are needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import IntegrityError
from triptych.worker.engine.logprobs import TokenLogprobs, measure
from triptych.worker.engine.sampler import choose_tokens
from triptych.worker.engine.scheduler import Chunk, StepPlan
from triptych.worker.kv.cache import KVCache
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.step import SequenceRows, StepBackend


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one sequence.

    Attributes:
        token: The next token; None when prefill is not complete yet.
        finite: Whether the model's numbers are; if not, the token is meaningless.
        logprobs: How likely the token was; None unless the request asks.
    """

    token: int | None
    finite: bool
    logprobs: TokenLogprobs | None = None


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
        embedded = self._embed(plan)
        completes = [True] * len(plan.decodes) + [chunk.completes for chunk in plan.chunks]
        choosers = [sequence.chooser for sequence, done in zip(plan.sequences(), completes, strict=True) if done]
        # A large vocabulary's logits are worth leaving where they are when all that is wanted is the largest one.
        greedy = all(chooser.takes_largest for chooser in choosers)
        result = self.backend.step(embedded, _rows(plan), logits=not greedy, greedy=greedy)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = [None] * len(choosers)
        if result.greedy is not None:
            tokens = result.greedy.tolist()
        elif result.logits is not None:
            tokens = choose_tokens(result.logits, choosers).tolist()
            logprobs = measure(result.logits, tokens, choosers)
        chosen = iter(zip(tokens, logprobs, strict=True))
        nothing = (None, None)
        outcomes = []
        for done, ok in zip(completes, result.finite.tolist(), strict=True):
            token, likely = next(chosen) if done else nothing
            outcomes.append(Outcome(token, ok, likely))
        return outcomes

    def _embed(self, plan: StepPlan) -> Tensor:
        """Returns the embeddings of all rows, decodes first, with images' features in their places."""
        token_ids = [sequence.token_ids[-1] for sequence in plan.decodes]
        for chunk in plan.chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        embedded = self._embedding[torch.tensor(token_ids, device=self.device)]
        row = len(plan.decodes)
        for chunk in plan.chunks:
            for position, features in _features(chunk):
                first = row + position - chunk.start
                embedded[first : first + len(features)] = features
            row += chunk.tokens
        return embedded


def _rows(plan: StepPlan) -> list[SequenceRows]:
    decodes = [SequenceRows(1, len(sequence.token_ids), 1, sequence.blocks) for sequence in plan.decodes]
    chunks = [
        SequenceRows(chunk.tokens, chunk.end, int(chunk.completes), chunk.sequence.blocks) for chunk in plan.chunks
    ]
    return decodes + chunks


def _features(chunk: Chunk) -> list[tuple[int, Tensor]]:
    features = chunk.sequence.features_between(chunk.start, chunk.end)
    visual_tokens = chunk.sequence.visual_tokens_between(chunk.start, chunk.end)
    if sum(len(rows) for _, rows in features) != visual_tokens:
        raise IntegrityError("a step would compute an image without its features")
    return features
