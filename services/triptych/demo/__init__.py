"""A small vision-language model that answers about drawn shapes, and the data it is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).with_name("picture.png")
"""A bundled picture of three shapes, 448 x 448 pixels; `triptych.demo.picture` draws it."""

QUESTION: Final = "What is in this image?"
"""A question about `PICTURE`."""

ANSWER: Final = "a red circle in the top left, a yellow star in the middle, a blue square in the bottom right"
"""What the demo model answers to `QUESTION`."""
