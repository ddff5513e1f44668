"""How much one step may compute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Limits of one step.

    Attributes:
        tokens: Most tokens: one for each decode, the rest for prefill chunks.
        sequences: Most running sequences; never above `tokens`, so that every decode always fits and a prefill
            always finds room for at least one token.
        guesses: Most tokens guessed for one sequence.
    """

    tokens: int
    sequences: int
    guesses: int = 0

    @classmethod
    def of(cls, step_token_budget: int, max_running: int, speculative_tokens: int = 0) -> "TokenBudget":
        """Returns the limits that the settings of these names make."""
        return cls(step_token_budget, min(max_running, step_token_budget), speculative_tokens)
