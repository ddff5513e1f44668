"""How many visual tokens of an image to keep, and how: as people write it and as messages carry it.

Free of numpy, because clients and the gateway read it, too; `reduction` does the work.
"""

import re
from dataclasses import dataclass
from typing import Literal

from triptych.errors import InvalidRequest
from triptych.v1 import inference_pb2

DEFAULT_TOKENS = 128
MAX_TOKENS = 9999

PATTERN = r"^(none|(kmeans|merge)(:[1-9][0-9]{0,3})?)$"
"""What a written reduction looks like."""

RULE = f"none, kmeans, merge, kmeans:N or merge:N with N from 1 to {MAX_TOKENS} (without N: {DEFAULT_TOKENS})"

Method = Literal["kmeans", "merge"]

_METHODS: dict[int, Method] = {
    inference_pb2.REDUCTION_METHOD_KMEANS: "kmeans",
    inference_pb2.REDUCTION_METHOD_MERGE: "merge",
}
_NUMBERS = {name: inference_pb2.ReductionMethod.ValueType(number) for number, name in _METHODS.items()}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A wish for fewer tokens. An image that has no more than `tokens` is left as it is.

    Attributes:
        method: `kmeans` or `merge`.
        tokens: Tokens kept of each image, 1 to MAX_TOKENS.
    """

    method: Method
    tokens: int = DEFAULT_TOKENS

    def __str__(self) -> str:
        return f"{self.method}:{self.tokens}"

    @property
    def number(self) -> inference_pb2.ReductionMethod.ValueType:
        """The method's number in messages."""
        return _NUMBERS[self.method]


def parse_reduction(text: str) -> Reduction | None:
    """Returns what `none`, `kmeans`, `merge:32` and the like mean; None is no reduction.

    Raises InvalidRequest (REDUCTION_INVALID).
    """
    match = re.fullmatch(PATTERN, text)
    if match is None:
        raise _invalid(f"{text!r} is none")
    if text == "none":
        return None
    method, _, tokens = text.partition(":")
    return _checked("kmeans" if method == "kmeans" else "merge", int(tokens) if tokens else DEFAULT_TOKENS)


def to_message(reduction: Reduction | None) -> inference_pb2.TokenReduction:
    """Returns a reduction as a request carries it; None asks for all tokens, whatever the service's default is."""
    if reduction is None:
        return inference_pb2.TokenReduction(method=inference_pb2.REDUCTION_METHOD_NONE)
    return inference_pb2.TokenReduction(method=reduction.number, tokens=reduction.tokens)


def from_message(message: inference_pb2.TokenReduction, default: Reduction | None) -> Reduction | None:
    """Returns the reduction that a request asks for, `default` where it leaves that open.

    Raises InvalidRequest (REDUCTION_INVALID).
    """
    if message.method in _METHODS:
        return _checked(_METHODS[message.method], message.tokens or DEFAULT_TOKENS)
    if message.method not in inference_pb2.ReductionMethod.values():
        raise _invalid(f"method {message.method} is unknown")
    if message.tokens:
        raise _invalid("tokens were given without a method")
    return default if message.method == inference_pb2.REDUCTION_METHOD_UNSPECIFIED else None


def reduction_text(image: inference_pb2.ImageReport) -> str | None:
    """Returns what made an image's tokens fewer, as it is written; None when nothing did."""
    if not image.HasField("reduction"):
        return None
    return f"{_METHODS[image.reduction.method]}:{image.reduction.tokens}"


def _checked(method: Method, tokens: int) -> Reduction:
    if not 1 <= tokens <= MAX_TOKENS:
        raise _invalid(f"{tokens} tokens is out of range")
    return Reduction(method, tokens)


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"a token reduction is {RULE}; {why}", reason="REDUCTION_INVALID")
