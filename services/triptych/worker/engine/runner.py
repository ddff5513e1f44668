"""Executes a plan: gathers its tokens into tensors, runs the decoder, chooses tokens where logits are needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import IntegrityError
from triptych.worker.engine.logprobs import TokenLogprobs, measure
from triptych.worker.engine.sampler import choose_tokens
from triptych.worker.engine.scheduler import Chunk, StepPlan
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.model.attention import AttentionBatch, ChunkView, view_chunk, view_decodes
from triptych.worker.model.decoder import Decoder


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
    """Owns the decoder and the cache's tensors."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Outcome]:
        """Computes a plan's tokens. Returns one outcome for each of `plan.sequences()`, in that order."""
        decoder = self.decoder
        token_ids, positions = _flatten(plan)
        visual, batch = self._describe(plan)
        embedded = decoder.embed(torch.tensor(token_ids, device=decoder.device), visual)
        hidden = decoder.forward(embedded, torch.tensor(positions, device=decoder.device), batch, self.cache)
        # The last row of each sequence attends to all it has: if anything before is not finite, neither is that row.
        last = hidden[_last_rows(plan, decoder.device)]
        finite = last.isfinite().all(dim=-1).tolist()
        completes = [True] * len(plan.decodes) + [chunk.completes for chunk in plan.chunks]
        choosers = [sequence.chooser for sequence, done in zip(plan.sequences(), completes, strict=True) if done]
        if not choosers:
            return [Outcome(None, ok) for ok in finite]
        logits = decoder.logits(last[torch.tensor(completes, device=decoder.device)])
        tokens: list[int] = choose_tokens(logits, choosers).tolist()
        chosen = iter(zip(tokens, measure(logits, tokens, choosers), strict=True))
        nothing = (None, None)
        outcomes = []
        for done, ok in zip(completes, finite, strict=True):
            token, logprobs = next(chosen) if done else nothing
            outcomes.append(Outcome(token, ok, logprobs))
        return outcomes

    def _describe(self, plan: StepPlan) -> tuple[list[tuple[int, Tensor]], AttentionBatch]:
        """Returns the features to splice in, by row, and how the rows attend."""
        device = self.decoder.device
        slots: list[Tensor] = []
        decodes = None
        if plan.decodes:
            contexts = [len(sequence.token_ids) for sequence in plan.decodes]
            tables = [sequence.blocks for sequence in plan.decodes]
            decodes = view_decodes(tables, contexts, BLOCK_TOKENS, device)
            last = [
                table[-1] * BLOCK_TOKENS + (n - 1) % BLOCK_TOKENS for table, n in zip(tables, contexts, strict=True)
            ]
            slots.append(torch.tensor(last, device=device))
        visual: list[tuple[int, Tensor]] = []
        chunks: list[ChunkView] = []
        row = len(plan.decodes)
        for chunk in plan.chunks:
            visual += [(row + position - chunk.start, rows) for position, rows in _features(chunk)]
            table = torch.tensor(chunk.sequence.blocks[: -(-chunk.end // BLOCK_TOKENS)], device=device)
            places = torch.arange(chunk.start, chunk.end, device=device)
            slots.append(table[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS)
            chunks.append(view_chunk(row, chunk.start, chunk.tokens, table))
            row += chunk.tokens
        return visual, AttentionBatch(torch.cat(slots), decodes, tuple(chunks))


def _flatten(plan: StepPlan) -> tuple[list[int], list[int]]:
    """Returns token ids and positions of all rows."""
    token_ids = [sequence.token_ids[-1] for sequence in plan.decodes]
    positions = [len(sequence.token_ids) - 1 for sequence in plan.decodes]
    for chunk in plan.chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
    return token_ids, positions


def _last_rows(plan: StepPlan, device: torch.device) -> Tensor:
    rows = list(range(len(plan.decodes)))
    end = len(rows)
    for chunk in plan.chunks:
        end += chunk.tokens
        rows.append(end - 1)
    return torch.tensor(rows, device=device)


def _features(chunk: Chunk) -> list[tuple[int, Tensor]]:
    features = chunk.sequence.features_between(chunk.start, chunk.end)
    visual_tokens = chunk.sequence.visual_tokens_between(chunk.start, chunk.end)
    if sum(len(rows) for _, rows in features) != visual_tokens:
        raise IntegrityError("a step would compute an image without its features")
    return features
