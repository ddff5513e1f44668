"""The scenarios: pure functions from a seed to what arrives. To add one, write a function and name it in SCENARIOS."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from triptych.bench.content import PictureFormat, make_picture, make_prompt
from triptych.bench.workload import Arrival, Conversation, Turn

TURNS = 3
"""Turns of a `multi-turn` conversation."""

BURST = 4
"""Image requests that arrive together in `mixed`."""

TEXTS_PER_BURST = 8
"""Text requests between two bursts in `mixed`."""

LONGER = 4
"""Length of the prompts that arrive together in `text-bursts`, in prompts of the shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that all scenarios share.

    Attributes:
        prompt_tokens: Words of text in a turn, each about a token.
        output_tokens: Tokens of an answer.
        picture_side: Pixels per side.
        picture_format: How pictures are encoded.
    """

    prompt_tokens: int = 128
    output_tokens: int = 64
    picture_side: int = 512
    picture_format: PictureFormat = "JPEG"


class Author:
    """Writes turns; the state of its generator is all that tells two calls apart."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)

    def prompt(self, times: int = 1) -> str:
        """Returns a new prompt, `times` as long as the shape says."""
        return make_prompt(self._rng, times * self._shape.prompt_tokens)

    def picture(self) -> bytes:
        """Returns a new picture."""
        return make_picture(self._rng, self._shape.picture_side, self._shape.picture_format)

    def ask(self, label: str, pictures: int = 0) -> Conversation:
        """Returns a conversation of one turn with new pictures."""
        return Conversation(label, (Turn(self.prompt(), tuple(self.picture() for _ in range(pictures))),))


Scenario = Callable[[Author, int], list[Arrival]]
"""Returns the arrivals of `count` conversations."""


def text(author: Author, count: int) -> list[Arrival]:
    """Text only."""
    return [(author.ask("text"),) for _ in range(count)]


def one_image(author: Author, count: int) -> list[Arrival]:
    """One new picture a request."""
    return [(author.ask("image", 1),) for _ in range(count)]


def four_images(author: Author, count: int) -> list[Arrival]:
    """Four new pictures a request."""
    return [(author.ask("images", 4),) for _ in range(count)]


def repeated_image(author: Author, count: int) -> list[Arrival]:
    """One picture for all requests, each with another question; the first is labelled `first`, the rest `again`."""
    picture = author.picture()
    labels = ["first", *["again"] * (count - 1)][:count]
    return [(Conversation(label, (Turn(author.prompt(), (picture,)),)),) for label in labels]


def multi_turn(author: Author, count: int) -> list[Arrival]:
    """A picture, then further questions about it; every turn carries the dialogue so far."""
    return [
        (
            Conversation(
                "dialogue",
                (Turn(author.prompt(), (author.picture(),)), *(Turn(author.prompt()) for _ in range(TURNS - 1))),
            ),
        )
        for _ in range(count)
    ]


def mixed(author: Author, count: int) -> list[Arrival]:
    """Text requests, and after every TEXTS_PER_BURST of them BURST image requests at once."""
    return _with_bursts(count, lambda: author.ask("text"), lambda: author.ask("image", 1))


def text_bursts(author: Author, count: int) -> list[Arrival]:
    """As `mixed`, but what arrives at once are texts, LONGER times as long."""
    return _with_bursts(count, lambda: author.ask("text"), lambda: Conversation("long", (Turn(author.prompt(LONGER)),)))


def _with_bursts(count: int, single: Callable[[], Conversation], of_burst: Callable[[], Conversation]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    made = 0
    while made < count:
        is_burst = len(arrivals) % (TEXTS_PER_BURST + 1) == TEXTS_PER_BURST
        size = min(BURST, count - made) if is_burst else 1
        arrivals.append(tuple(of_burst() if is_burst else single() for _ in range(size)))
        made += size
    return arrivals


SCENARIOS: dict[str, Scenario] = {
    "text": text,
    "one-image": one_image,
    "four-images": four_images,
    "repeated-image": repeated_image,
    "multi-turn": multi_turn,
    "mixed": mixed,
    "text-bursts": text_bursts,
}


def make_arrivals(scenario: str, shape: Shape, count: int, seed: int) -> list[Arrival]:
    """Returns what arrives, in order. Equal arguments give equal requests. Raises KeyError for an unknown scenario."""
    return SCENARIOS[scenario](Author(shape, seed), count)
