"""From the logits of a step's rows to each sequence's new tokens, guessed ones included where they came true."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.worker.engine.logprobs import TokenLogprobs, measure
from triptych.worker.engine.sampler import TokenChooser, choose_tokens

Chosen = tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]
"""A sequence's new tokens, and how likely each was."""


class Wanted(NamedTuple):
    """What one sequence takes from a step.

    Attributes:
        rows: How many rows of logits are its own: 0, or one more than guesses.
        chooser: Chooses its tokens.
        guess: What was assumed to follow; row i + 1 holds only if guess i was chosen at row i.
    """

    rows: int
    chooser: TokenChooser
    guess: tuple[int, ...]


def confirm(largest: list[int], wanted: Sequence[Wanted]) -> list[Chosen]:
    """Returns each sequence's tokens, given the largest logit of every row: up to the first guess that is wrong."""
    chosen: list[Chosen] = []
    first = 0
    for rows, _, guess in wanted:
        kept = min(rows, 1)
        while kept < rows and largest[first + kept - 1] == guess[kept - 1]:
            kept += 1
        chosen.append((tuple(largest[first : first + kept]), (None,) * kept))
        first += rows
    return chosen


def choose(logits: Tensor, wanted: Sequence[Wanted]) -> list[Chosen]:
    """Returns each sequence's tokens, given the logits [rows, vocabulary] of all.

    First tokens are chosen together. A further one only once the guess before has come true: a sample that draws its
    noise in vain would not be the one that its seed stands for.
    """
    first = 0
    firsts: list[int] = []
    for each in wanted:
        firsts.append(first)
        first += each.rows
    asking = [index for index, each in enumerate(wanted) if each.rows]
    choosers = [wanted[index].chooser for index in asking]
    together = logits[torch.tensor([firsts[index] for index in asking], device=logits.device)]
    tokens: list[int] = choose_tokens(together, choosers).tolist()
    chosen: list[Chosen] = [((), ())] * len(wanted)
    for index, token, logprobs in zip(asking, tokens, measure(together, tokens, choosers), strict=True):
        rows, chooser, guess = wanted[index]
        kept, likely = [token], [logprobs]
        while len(kept) < rows and kept[-1] == guess[len(kept) - 1]:
            row = firsts[index] + len(kept)
            one = logits[row : row + 1]
            kept += choose_tokens(one, [chooser]).tolist()
            likely += measure(one, kept[-1:], [chooser])
        chosen[index] = (tuple(kept), tuple(likely))
    return chosen
