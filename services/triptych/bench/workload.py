"""What is sent, before anybody sends it: conversations, and which of them arrive together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a person says: pictures (encoded files), then text."""

    text: str
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are sent one after the other, each with the answers so far.

    Attributes:
        label: Kind of request, for statistics of its own (`text`, `image`).
        turns: At least one.
    """

    label: str
    turns: tuple[Turn, ...]


Arrival = tuple[Conversation, ...]
"""Conversations that arrive at the same moment: one, or a burst."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue, as a server is told it."""

    role: Role
    text: str
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        messages: The dialogue, the person's new turn last.
        max_tokens: Tokens to generate; exactly so many where the server can be told to ignore the end of sequence.
    """

    messages: tuple[Message, ...]
    max_tokens: int


def count_conversations(arrivals: Sequence[Arrival]) -> int:
    """Returns how many conversations arrive."""
    return sum(len(arrival) for arrival in arrivals)
