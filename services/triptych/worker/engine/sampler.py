"""From logits to tokens, for a whole batch at once."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.worker.engine.drawing import draw, draw_filtered
from triptych.worker.engine.request import SamplingOptions

# Below this temperature, float32 softmax puts everything on the most likely token.
_GREEDY_BELOW = 1e-5
# The largest float32 below 1: `random()` may return more, which would round to 1.
_LARGEST_DRAW = 1.0 - 2.0**-24


class TokenChooser:
    """How one sequence's tokens are chosen, and what that depends on.

    Noise comes from a generator of its own, one number per token: it is the same on every device and whatever else is
    in the batch.

    Attributes:
        options: The request's wishes.
        seen: True for token ids in prompt or output, [vocabulary]; None without a repetition penalty.
    """

    def __init__(
        self, options: SamplingOptions, prompt_ids: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        self.options = options
        self.seen: Tensor | None = None
        if options.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.seen[torch.tensor(prompt_ids, device=device)] = True
        self._noise = random.Random(options.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.options.temperature < _GREEDY_BELOW

    @property
    def takes_largest(self) -> bool:
        """Whether the largest logit alone says which token comes, and nobody wants to know more of them."""
        return self.is_greedy and self.seen is None and self.options.top_logprobs is None

    def draw(self) -> float:
        """Returns the next number of this sequence's noise, in [0, 1)."""
        return min(self._noise.random(), _LARGEST_DRAW)

    def note(self, token: int) -> None:
        """Remembers a token that was chosen."""
        if self.seen is not None:
            self.seen[token] = True


def choose_tokens(logits: Tensor, choosers: Sequence[TokenChooser]) -> Tensor:
    """Chooses one token per row, in Hugging Face's order: repetition penalty, temperature, top-k, top-p.

    Args:
        logits: [rows, vocabulary], float32. Not changed.
        choosers: One per row; rows that sample draw one number each.

    Returns:
        Token ids, [rows].
    """
    logits = _penalize(logits, choosers)
    rows = [row for row, chooser in enumerate(choosers) if not chooser.is_greedy]
    if len(rows) == len(choosers):
        return _sample(logits, choosers)
    tokens = logits.argmax(dim=-1)
    if rows:
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _sample(logits[index], [choosers[row] for row in rows])
    return tokens


def _penalize(logits: Tensor, choosers: Sequence[TokenChooser]) -> Tensor:
    """Divides positive and multiplies negative logits of seen tokens (Keskar et al., CTRL, arXiv:1909.05858)."""
    penalized = [(row, c.seen, c.options.repetition_penalty) for row, c in enumerate(choosers) if c.seen is not None]
    if not penalized:
        return logits
    index = torch.tensor([row for row, _, _ in penalized], device=logits.device)
    seen = torch.stack([mask for _, mask, _ in penalized])
    penalty = torch.tensor([penalty for _, _, penalty in penalized], device=logits.device)[:, None]
    chosen = logits[index]
    changed = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits.index_copy(0, index, torch.where(seen, changed, chosen))


def _sample(logits: Tensor, choosers: Sequence[TokenChooser]) -> Tensor:
    """Draws one token per row from its distribution, as temperature, top-k and top-p make it."""
    device = logits.device

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    options = [chooser.options for chooser in choosers]
    probabilities = (logits / column([each.temperature for each in options])).softmax(dim=-1)
    noise = column([chooser.draw() for chooser in choosers])
    tokens = torch.empty((len(choosers), 1), dtype=torch.long, device=device)
    filters = [each.top_k > 0 or each.top_p < 1 for each in options]
    for filtered in set(filters):
        rows = [row for row, does in enumerate(filters) if does is filtered]
        index = torch.tensor(rows, device=device)
        some = probabilities if len(rows) == len(choosers) else probabilities[index]
        if filtered:
            top_k = column([options[row].top_k for row in rows], torch.long)
            top_p = column([options[row].top_p for row in rows])
            tokens[index] = draw_filtered(some, top_k, top_p, noise[index])
        else:
            tokens[index] = draw(some, noise[index])
    return tokens[:, 0]
