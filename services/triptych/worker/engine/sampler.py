"""From logits to tokens, for a whole batch at once."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

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
    tokens = logits.argmax(dim=-1)
    rows = [row for row, chooser in enumerate(choosers) if not chooser.is_greedy]
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
    """Draws from the filtered distribution by inverting its cumulative sum, most likely token first."""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    vocabulary = logits.shape[-1]
    temperature = column([chooser.options.temperature for chooser in choosers])
    top_k = column([chooser.options.top_k or vocabulary for chooser in choosers])
    top_p = column([chooser.options.top_p for chooser in choosers])
    noise = column([chooser.draw() for chooser in choosers])
    ordered, order = logits.sort(dim=-1, descending=True)
    place = torch.arange(vocabulary, device=device)
    probabilities = (ordered / temperature).masked_fill_(place >= top_k, -torch.inf).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # A token is kept while the more likely ones have not reached top_p; the first always is.
    kept = ((cumulative - probabilities < top_p) & (probabilities > 0)).sum(dim=-1, keepdim=True)
    last = kept - 1
    mass = cumulative.gather(-1, last)
    choice = (cumulative <= noise * mass).sum(dim=-1, keepdim=True).minimum(last)
    return order.gather(-1, choice).squeeze(-1)
