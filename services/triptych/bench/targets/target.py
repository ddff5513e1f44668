"""The contract of a server that can be measured."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from triptych.bench.workload import Ask


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that arrived. `tokens` is how many it stands for, as far as the server says; else 1."""

    text: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own counts; prompt_tokens is None where it gives none."""

    prompt_tokens: int | None
    output_tokens: int


class RequestFailed(Exception):
    """One request failed; the benchmark goes on. `kind` is short, without anything of the request, and is counted."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Target(Protocol):
    """A server under measurement. Used in one event loop."""

    name: str
    """How reports call it."""

    model: str
    """The model that answers; known after `prepare`."""

    async def prepare(self) -> None:
        """Finds out what the server needs to be told (its model's name, its extensions); called once, first.

        Raises Unavailable when nobody answers.
        """

    def stream(self, ask: Ask) -> AsyncGenerator[Piece | Usage, None]:
        """Sends a request and yields what comes, without delay; ends only when the answer is complete.

        Raises RequestFailed for a refusal, a broken stream or a time-out. Closing the generator ends the request.
        """

    async def close(self) -> None:
        """Closes all connections."""
