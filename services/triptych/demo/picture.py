"""Draws the demo's bundled picture: `python -m triptych.demo.picture`."""

from __future__ import annotations

from typing import Final

from triptych.demo import PICTURE
from triptych.demo.drawing import Scene, Shape, draw

SIZE: Final = 448

SCENE: Final = Scene(
    shapes=(
        Shape("circle", "red", 0, x=0.19, y=0.2, radius=0.15, turn_degrees=0, rgb=(229, 57, 53), outlined=False),
        Shape("star", "yellow", 4, x=0.5, y=0.51, radius=0.16, turn_degrees=8, rgb=(253, 210, 20), outlined=False),
        Shape("square", "blue", 8, x=0.81, y=0.8, radius=0.145, turn_degrees=-7, rgb=(30, 100, 230), outlined=False),
    ),
    top=(250, 250, 252),
    bottom=(236, 239, 246),
    noise=0.0,
    noise_seed=0,
)

if __name__ == "__main__":
    draw(SCENE, SIZE).save(PICTURE, optimize=True)
