"""Scenes of coloured shapes on a 3x3 grid: what is in them, and how they are drawn at any size."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw

NATIVE_SIZE: Final = 112
"""Side in pixels of the pictures the demo model is trained on."""

GRID: Final = 3
"""Cells per row and per column; cell `i` is row `i // 3`, column `i % 3`."""

FORMS: Final = ("circle", "square", "triangle", "star")
COLOURS: Final = ("red", "green", "blue", "yellow", "purple", "orange")

_PLAIN_COLOURS: Final[dict[str, tuple[tuple[int, int, int], ...]]] = {
    "red": ((255, 0, 0), (220, 20, 60)),
    "green": ((0, 128, 0), (0, 255, 0)),
    "blue": ((0, 0, 255), (30, 100, 255)),
    "yellow": ((255, 255, 0), (255, 215, 0)),
    "purple": ((128, 0, 128), (140, 60, 200)),
    "orange": ((255, 165, 0), (255, 128, 0)),
}
_HUES_DEGREES: Final[dict[str, tuple[float, float]]] = {
    "red": (-10, 8),
    "green": (95, 150),
    "blue": (205, 245),
    "yellow": (50, 62),
    "purple": (268, 302),
    "orange": (24, 39),
}
_DARKEST_VALUE: Final[dict[str, float]] = {
    "red": 0.7,
    "green": 0.45,
    "blue": 0.6,
    "yellow": 0.85,
    "purple": 0.45,
    "orange": 0.88,
}

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a scene.

    Attributes:
        form: One of `FORMS`.
        colour: One of `COLOURS`, the word for `rgb`.
        cell: Grid cell, 0 (top left) to 8 (bottom right).
        x: Centre, as a share of the picture's width.
        y: Centre, as a share of the picture's height.
        radius: Radius of the circle around the shape, as a share of the picture's side.
        turn_degrees: Rotation, clockwise.
        rgb: The exact shade.
        outlined: Whether a thin dark line follows the edge.
    """

    form: str
    colour: str
    cell: int
    x: float
    y: float
    radius: float
    turn_degrees: float
    rgb: Rgb
    outlined: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows; holds no pixels, so it can be drawn at any size.

    Attributes:
        shapes: One to four shapes in distinct cells, in reading order.
        top: Background at the upper edge.
        bottom: Background at the lower edge; the background fades from one to the other.
        noise: Standard deviation of the pixel noise, in grey levels of 255.
        noise_seed: Seed of that noise.
    """

    shapes: tuple[Shape, ...]
    top: Rgb
    bottom: Rgb
    noise: float
    noise_seed: int


def random_scene(rng: Generator, fewest: int = 1, most: int = 3) -> Scene:
    """Draws a scene's content from `rng`: one to three shapes or as many as asked, a background, a little noise.

    Nearly half the scenes keep to one or two forms and colours, so that equal shapes occur and counting is worth it.
    """
    count = int(rng.integers(fewest, most + 1))
    cells = sorted(int(cell) for cell in rng.choice(GRID * GRID, size=count, replace=False))
    few = int(rng.integers(1, 3)) if rng.random() < 0.45 else len(COLOURS)
    forms, colours = rng.permutation(FORMS)[:few], rng.permutation(COLOURS)[:few]
    shapes = tuple(
        _random_shape(rng, cell, str(rng.choice(forms)), str(rng.choice(colours)), alone=count == 1) for cell in cells
    )
    top, bottom = _random_background(rng)
    noise = float(rng.uniform(0, 8)) if rng.random() < 0.5 else 0.0
    return Scene(shapes, top, bottom, noise, int(rng.integers(2**31)))


def draw(scene: Scene, size: int = NATIVE_SIZE) -> Image.Image:
    """The scene as an RGB picture of `size` x `size` pixels, anti-aliased; the same scene gives the same bytes."""
    finer = 3 if size <= NATIVE_SIZE else 2
    canvas = _background(scene, size * finer)
    pen = ImageDraw.Draw(canvas)
    for shape in scene.shapes:
        _draw_shape(pen, shape, size * finer)
    picture = canvas.reduce(finer)
    if scene.noise == 0:
        return picture
    noise = np.random.default_rng(scene.noise_seed).standard_normal((size, size, 3), dtype=np.float32)
    noisy = np.asarray(picture, dtype=np.float32) + scene.noise * noise
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def silhouette(scene: Scene, size: int) -> Image.Image:
    """The scene's shapes in white on black, in grey levels, at `size` x `size` pixels."""
    white = tuple(replace(shape, rgb=(255, 255, 255), outlined=False) for shape in scene.shapes)
    return draw(Scene(white, (0, 0, 0), (0, 0, 0), noise=0.0, noise_seed=0), size).convert("L")


def _random_shape(rng: Generator, cell: int, form: str, colour: str, *, alone: bool) -> Shape:
    row, column = divmod(cell, GRID)
    largest = 0.62 if alone and cell == 4 else 0.5
    radius = float(rng.uniform(0.25, largest))
    slack = max(0.06, 0.48 - radius)
    dx, dy = (float(shift) for shift in rng.uniform(-slack, slack, size=2).clip(-0.16, 0.16))
    turn = float(rng.uniform(-12, 12)) if rng.random() < 0.5 else 0.0
    return Shape(
        form=form,
        colour=colour,
        cell=cell,
        x=(column + 0.5 + dx) / GRID,
        y=(row + 0.5 + dy) / GRID,
        radius=radius / GRID,
        turn_degrees=turn,
        rgb=_shade(rng, colour),
        outlined=bool(rng.random() < 0.15),
    )


def _shade(rng: Generator, colour: str) -> Rgb:
    if rng.random() < 0.3:
        plain = _PLAIN_COLOURS[colour]
        return plain[int(rng.integers(len(plain)))]
    hue = float(rng.uniform(*_HUES_DEGREES[colour])) % 360 / 360
    saturation = float(rng.uniform(0.75, 1.0))
    value = float(rng.uniform(_DARKEST_VALUE[colour], 1.0))
    return _to_rgb(colorsys.hsv_to_rgb(hue, saturation, value))


def _random_background(rng: Generator) -> tuple[Rgb, Rgb]:
    kind = rng.random()
    if kind < 0.3:
        return (255, 255, 255), (255, 255, 255)
    if kind < 0.75:
        value = float(rng.uniform(0.85, 1.0))
    elif kind < 0.88:
        value = float(rng.uniform(0.45, 0.8))
    else:
        value = float(rng.uniform(0.0, 0.25))
    top = _to_rgb(colorsys.hsv_to_rgb(float(rng.random()), float(rng.uniform(0, 0.12)), value))
    if rng.random() < 0.6:
        return top, top
    shift = int(rng.integers(-20, 21))
    return top, (_level(top[0] + shift), _level(top[1] + shift), _level(top[2] + shift))


def _to_rgb(parts: tuple[float, float, float]) -> Rgb:
    return _level(255 * parts[0]), _level(255 * parts[1]), _level(255 * parts[2])


def _level(value: float) -> int:
    return min(255, max(0, round(value)))


def _background(scene: Scene, size: int) -> Image.Image:
    if scene.top == scene.bottom:
        return Image.new("RGB", (size, size), scene.top)
    fade = np.linspace(0.0, 1.0, size, dtype=np.float32)[:, None]
    column = (1 - fade) * np.array(scene.top, np.float32) + fade * np.array(scene.bottom, np.float32)
    return Image.fromarray(np.repeat(np.rint(column).astype(np.uint8)[:, None], size, axis=1))


def _draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, size: int) -> None:
    x, y, radius = shape.x * size, shape.y * size, shape.radius * size
    edge = tuple(level // 3 for level in shape.rgb) if shape.outlined else None
    width = max(1, round(size / 110)) if shape.outlined else 0
    if shape.form == "circle":
        radius *= 0.9
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.rgb, outline=edge, width=width)
        return
    pen.polygon(_corners(shape.form, x, y, radius, shape.turn_degrees), fill=shape.rgb, outline=edge, width=width)


def _corners(form: str, x: float, y: float, radius: float, turn_degrees: float) -> list[tuple[float, float]]:
    if form == "star":
        steps, radii = 10, (radius * 1.05, radius * 0.45)
    elif form == "triangle":
        steps, radii = 3, (radius, radius)
    else:
        steps, radii = 4, (radius * 1.1, radius * 1.1)
    first = 45 if form == "square" else 0
    angles = [math.radians(first + turn_degrees + 360 * step / steps) for step in range(steps)]
    return [
        (x + radii[step % 2] * math.sin(angle), y - radii[step % 2] * math.cos(angle))
        for step, angle in enumerate(angles)
    ]
