"""Pictures with dialogues about them: the demo model's training stream and its held-out set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator
from PIL import Image

from triptych.demo.dialogues import KINDS, Dialogue, Kind, Turn, dialogue
from triptych.demo.drawing import NATIVE_SIZE, Scene, Shape, draw, random_scene

__all__ = [
    "KINDS",
    "NATIVE_SIZE",
    "Dialogue",
    "Example",
    "Kind",
    "Scene",
    "Shape",
    "Turn",
    "draw",
    "held_out",
    "held_out_rng",
    "training_rng",
]

_TRAINING_STREAM: Final = 0
_HELD_OUT_STREAM: Final = 1


@dataclass(frozen=True, slots=True)
class Example:
    """One picture and one dialogue about it.

    Attributes:
        scene: What the picture shows.
        image: The picture, RGB, `NATIVE_SIZE` on a side unless asked otherwise.
        dialogue: One or two turns; every answer is the only right one.
    """

    scene: Scene
    image: Image.Image
    dialogue: Dialogue


def training_rng(seed: int, index: int) -> Generator:
    """The random stream of training item `index`; shares nothing with any held-out stream."""
    return np.random.default_rng([_TRAINING_STREAM, seed, index])


def held_out_rng(index: int) -> Generator:
    """The random stream of held-out example `index`."""
    return np.random.default_rng([_HELD_OUT_STREAM, 0, index])


def held_out(n: int, size: int = NATIVE_SIZE) -> list[Example]:
    """The first `n` held-out examples, always the same ones; all kinds mixed except "no_image".

    `size` is the side in pixels at which the pictures are drawn; scenes and dialogues do not depend on it.
    """
    examples = []
    for index in range(n):
        rng = held_out_rng(index)
        scene = random_scene(rng)
        examples.append(Example(scene, draw(scene, size), dialogue(scene, rng)))
    return examples
