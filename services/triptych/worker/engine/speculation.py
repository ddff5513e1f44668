"""Guesses of the next tokens, so that one step can check several; here from earlier text (prompt lookup, n-grams).

A guess is never an answer: its tokens are computed behind the last known one, the model chooses at each position as it
always does, and what was guessed right is kept. Greedy answers and samples with a seed stay the same, token for token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

GRAM: Final = 3
"""How many tokens must have occurred before for what followed them to be a guess."""


class Guesses(Protocol):
    """Something that can be asked what comes next."""

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns at most `most` tokens that may follow; `token_ids` only ever grows at its end."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess that a draft model made beforehand, for the place behind `known` tokens."""

    known: int = 0
    tokens: tuple[int, ...] = ()

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """See `Guesses`."""
        return self.tokens[:most] if len(token_ids) == self.known else ()


class Guesser:
    """Remembers what followed every run of `GRAM` tokens of one sequence."""

    def __init__(self, never: int | None) -> None:
        """`never` is a token that is no guess and ends one: the image token, whose positions mean something else."""
        self._never = never
        self._known = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """See `Guesses`."""
        for end in range(max(self._known, GRAM), len(token_ids)):
            self._ends[tuple(token_ids[end - GRAM : end])] = end
        self._known = max(self._known, len(token_ids))
        found = self._ends.get(tuple(token_ids[-GRAM:])) if len(token_ids) >= GRAM else None
        if found is None:
            return ()
        guess = tuple(token_ids[found : found + most])
        return guess[: guess.index(self._never)] if self._never in guess else guess
