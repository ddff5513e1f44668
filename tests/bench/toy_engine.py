"""An engine for the shim that needs no model: counts, with a pause before each number."""

import time
from collections.abc import Iterator
from typing import Any

PAUSES_S = {"fast": 0.001, "slow": 0.01, "lame": 0.3}


class Toy:
    """Notes which answers were given up."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.asked: list[tuple[list[dict[str, Any]], list[bytes]]] = []
        self.given_up = 0

    def stream(
        self, messages: list[dict[str, Any]], pictures: list[bytes], max_tokens: int
    ) -> tuple[int, Iterator[str]]:
        self.asked.append((messages, pictures))
        return len(str(messages[-1]["content"]).split()), self._count(max_tokens)

    def _count(self, tokens: int) -> Iterator[str]:
        made = 0
        try:
            for number in range(tokens):
                time.sleep(self.pause_s)
                yield f"{number} "
                made += 1
        finally:
            self.given_up += made < tokens


def load(arguments: Any) -> Toy:
    return Toy(PAUSES_S[arguments.dtype])
