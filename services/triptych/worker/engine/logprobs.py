"""How likely the model held the tokens it chose, for requests that ask."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.worker.detokenizer import TokenDecoder
from triptych.worker.engine.sampler import TokenChooser


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place, under the model's own distribution.

    Attributes:
        chosen: The chosen token's id and logarithm.
        top: Those of the most likely tokens, most likely first.
    """

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The same with texts instead of ids."""

    chosen: tuple[str, float]
    top: tuple[tuple[str, float], ...]


def measure(logits: Tensor, tokens: Sequence[int], choosers: Sequence[TokenChooser]) -> list[TokenLogprobs | None]:
    """Returns, for each row of logits [rows, vocabulary], what its request wants to know; None where it is nothing.

    Logits are those the model gave, before penalties, temperature and filters.
    """
    found: list[TokenLogprobs | None] = [None] * len(choosers)
    for row, chooser in enumerate(choosers):
        wanted = chooser.options.top_logprobs
        if wanted is None:
            continue
        logprobs = logits[row].float().log_softmax(dim=-1)
        values, ids = logprobs.topk(min(wanted, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        found[row] = TokenLogprobs((tokens[row], float(logprobs[tokens[row]])), top)
    return found


def within(choices: Sequence[TokenChoice], text: str) -> tuple[TokenChoice, ...]:
    """Returns the leading choices that fit into a text cut off by a stop string: no part of that may show here."""
    length = 0
    for count, choice in enumerate(choices):
        length += len(choice.chosen[0])
        if length > len(text):
            return tuple(choices[:count])
    return tuple(choices)


def spell(logprobs: TokenLogprobs, previous: int, decoder: TokenDecoder) -> TokenChoice:
    """Returns the tokens' texts as they read after the token `previous`."""
    before = decoder.decode((previous,), skip_special_tokens=False)

    def text_of(token: int) -> str:
        both = decoder.decode((previous, token), skip_special_tokens=False)
        if both.startswith(before):
            return both[len(before) :]
        return decoder.decode((token,), skip_special_tokens=False)

    def spelled(entry: tuple[int, float]) -> tuple[str, float]:
        return text_of(entry[0]), entry[1]

    return TokenChoice(spelled(logprobs.chosen), tuple(map(spelled, logprobs.top)))
