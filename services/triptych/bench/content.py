"""Prompts and pictures from a random generator, equal for equal seeds on every machine."""

import io
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

# Each is one token in the byte-pair vocabularies in use, the demo model's too, so words approximate tokens.
WORDS = (
    "what", "is", "the", "in", "a", "of", "and", "where", "how", "many", "red", "green", "blue", "yellow",
    "circle", "square", "star", "top", "bottom", "left", "right", "middle", "picture",
)  # fmt: skip

PictureFormat = Literal["JPEG", "PNG"]

_SHAPES = 6


def make_prompt(rng: np.random.Generator, tokens: int) -> str:
    """Returns about `tokens` tokens of text; at least one word."""
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), max(1, tokens)))


def make_picture(rng: np.random.Generator, side: int, file_format: PictureFormat = "JPEG") -> bytes:
    """Returns an encoded square picture of `side` pixels: coloured ellipses on a soft gradient with some grain.

    It compresses like a photograph does, neither like noise nor like a flat drawing.
    """
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.uint8)
    image = Image.fromarray(corners).resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(_SHAPES):
        x, y = rng.integers(0, side, 2)
        width, height = rng.integers(1, max(2, side // 2), 2)
        pen.ellipse(
            (int(x), int(y), int(x + width), int(y + height)), fill=tuple(int(c) for c in rng.integers(0, 256, 3))
        )
    grain = rng.integers(-8, 9, (side, side, 1), dtype=np.int16)
    pixels = np.clip(np.asarray(image, np.int16) + grain, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format)
    return buffer.getvalue()
