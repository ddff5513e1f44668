"""How much one step may compute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Limits of one step.

    Attributes:
        tokens: Most tokens: one for each decode, the rest for prefill chunks.
        sequences: Most running sequences; never above `tokens`, so that every decode always fits and a prefill
            always finds room for at least one token.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, step_token_budget: int, max_running: int) -> "TokenBudget":
        """Returns the limits that the settings of these names make."""
        return cls(step_token_budget, min(max_running, step_token_budget))
