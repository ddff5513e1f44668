"""The first stage of training: the vision tower learns forms and colours before there is any language.

A tower that starts from noise inside the whole model takes many tens of thousands of pictures to tell a circle from
a square. Here it starts from filters and positions that suit pictures, sees crowded scenes whose shapes are large at
first, and is told each patch's silhouette and each cell's content.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPVisionModel, LlavaForConditionalGeneration

from triptych.demo.checkpoint import PATCH, TEXT_WIDTH, VISION_WIDTH
from triptych.demo.drawing import COLOURS, FORMS, GRID, NATIVE_SIZE, Scene, draw, random_scene, silhouette
from triptych.demo.optimising import adamw, set_rate
from triptych.demo.scenes import training_rng
from triptych.demo.vision import hidden_states, pixels_of

ROWS: Final = 64
PEAK_RATE: Final = 1.5e-3

_FIRST_INDEX: Final = 1_000_000
"""Where this stage's part of the training stream begins, far behind the dialogues'."""

_EARLY_LAYER: Final = 2
_MASK_SIDE: Final = PATCH // 2

Lesson = tuple[Tensor, Tensor, Tensor]
"""Pictures, uint8, [rows, size, size, 3]; each patch's silhouette, [rows, patches, 49]; cells, [rows, 9]."""


def cell_classes(scene: Scene) -> list[int]:
    """Each grid cell's content as a class: 0 for nothing, else 1 + form and colour."""
    classes = [0] * (GRID * GRID)
    for shape in scene.shapes:
        classes[shape.cell] = 1 + FORMS.index(shape.form) * len(COLOURS) + COLOURS.index(shape.colour)
    return classes


def cells_of_patches(patches: int) -> Tensor:
    """The grid cell in which each patch of a square picture has its centre, [patches]."""
    side = math.isqrt(patches)
    along = (2 * torch.arange(side) + 1) * GRID // (2 * side)
    return (along[:, None] * GRID + along).flatten()


class SightReader(nn.Module):
    """Throw-away linear heads that say what the visual tokens hold."""

    def __init__(self) -> None:
        super().__init__()
        self.content = nn.Linear(TEXT_WIDTH, 1 + len(FORMS) + len(COLOURS))
        self.silhouette = nn.Linear(VISION_WIDTH, _MASK_SIDE**2)

    def read(self, visual: Tensor) -> Tensor:
        """Logits [rows, 9, filled + forms + colours] of each grid cell, from projected tokens [rows, tokens, width]."""
        side = math.isqrt(visual.shape[1])
        grid = visual.transpose(1, 2).reshape(len(visual), -1, side, side)
        logits: Tensor = self.content(F.adaptive_avg_pool2d(grid, GRID).flatten(2).transpose(1, 2))
        return logits

    def cell_loss(self, visual: Tensor, cells: Tensor) -> Tensor:
        """How badly the tokens tell whether each cell is filled, with which form and in which colour."""
        logits = self.read(visual)
        filled = cells > 0
        forms = logits[filled][:, 1 : 1 + len(FORMS)]
        colours = logits[filled][:, 1 + len(FORMS) :]
        kinds = cells[filled] - 1
        return (
            F.binary_cross_entropy_with_logits(logits[..., 0], filled.float())
            + F.cross_entropy(forms, kinds // len(COLOURS))
            + F.cross_entropy(colours, kinds % len(COLOURS))
        )

    def silhouette_loss(self, early: Tensor, silhouettes: Tensor) -> Tensor:
        """How badly an early layer's tokens [rows, patches, width] tell which of their pixels a shape covers."""
        return F.binary_cross_entropy_with_logits(self.silhouette(early), silhouettes)

    @torch.no_grad()
    def right_forms(self, visual: Tensor, cells: Tensor) -> float:
        """Share of filled cells whose form is told rightly."""
        filled = cells > 0
        forms = self.read(visual)[filled][:, 1 : 1 + len(FORMS)].argmax(-1)
        return float((forms == (cells[filled] - 1) // len(COLOURS)).float().mean())


class TokenReader(nn.Module):
    """Throw-away heads that ask every visual token where it lies and what its grid cell holds.

    Without them the content of a cell is spread over its tokens and their places fade from layer to layer; the
    decoder then learns to look things up many times slower.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(TEXT_WIDTH, GRID * GRID)
        self.content = nn.Linear(TEXT_WIDTH, 1 + len(FORMS) * len(COLOURS))

    def loss(self, visual: Tensor, cells: Tensor) -> Tensor:
        """How badly projected tokens [rows, tokens, width] tell their cell, and its class of `cells` [rows, 9]."""
        place = cells_of_patches(visual.shape[1]).expand(len(visual), -1)
        content = cells.gather(1, place)
        return F.cross_entropy(self.place(visual).flatten(0, 1), place.flatten()) + F.cross_entropy(
            self.content(visual).flatten(0, 1), content.flatten()
        )


def give_structure(tower: CLIPVisionModel) -> None:
    """Starts an untrained tower with smooth filters (a rotated low-frequency DCT) and sine-cosine positions."""
    waves = torch.arange(PATCH, dtype=torch.float32)
    basis = torch.cos(math.pi * (waves + 0.5) * waves[:, None] / PATCH) * math.sqrt(2 / PATCH)
    basis[0] /= math.sqrt(2)
    slowest = sorted((u * u + v * v, u, v) for u in range(PATCH) for v in range(PATCH))[: VISION_WIDTH // 3]
    mixes = F.normalize(torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [0.5, 0.5, -1.0]]))
    filters = torch.zeros(VISION_WIDTH, 3, PATCH, PATCH)
    for number, (_, u, v) in enumerate(slowest):
        filters[3 * number : 3 * number + 3] = mixes[:, :, None, None] * torch.outer(basis[u], basis[v])
    rotation, _ = torch.linalg.qr(torch.randn(VISION_WIDTH, VISION_WIDTH))

    side = NATIVE_SIZE // PATCH
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    quarter = VISION_WIDTH // 4
    frequencies = (2 * math.pi / 16) * 8.0 ** (torch.arange(quarter) / (quarter - 1))
    angles = places[:, :, None] * frequencies
    waves_of_places = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)

    embeddings = tower.embeddings
    with torch.no_grad():
        embeddings.patch_embedding.weight.copy_(0.3 * torch.einsum("ab,bcij->acij", rotation, filters))
        embeddings.position_embedding.weight[1:] += 0.5 * waves_of_places


class _Lessons(Dataset[Lesson]):
    """Crowded scenes by step; shapes start large and pictures clean, and smaller pictures come late."""

    def __init__(self, seed: int, steps: int) -> None:
        self._seed = seed
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Lesson:
        rng = training_rng(self._seed, _FIRST_INDEX + step)
        ease = max(0.0, 1 - 3 * step / self._steps)
        size = int(rng.choice((84, 56))) if rng.random() < 0.3 * (step > self._steps / 2) else NATIVE_SIZE
        scenes = [_eased(random_scene(rng, fewest=4, most=9), ease) for _ in range(ROWS)]
        silhouettes = np.stack([_patch_silhouettes(scene, size) for scene in scenes])
        cells = torch.tensor([cell_classes(scene) for scene in scenes])
        return pixels_of([draw(scene) for scene in scenes], size), torch.from_numpy(silhouettes), cells


def learn_to_see(model: LlavaForConditionalGeneration, reader: SightReader, seed: int, steps: int) -> None:
    """Trains the tower, the projector and the reader for `steps` steps of `ROWS` pictures."""
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    optimizer = adamw(PEAK_RATE, tower, projector, reader)
    started = time.monotonic()
    for step, (pixels, silhouettes, cells) in enumerate(
        DataLoader(_Lessons(seed, steps), batch_size=None, num_workers=1, prefetch_factor=8)
    ):
        set_rate(optimizer, PEAK_RATE, step, steps)
        states = hidden_states(tower, pixels)
        visual = projector(states[-1][:, 1:])
        content = reader.cell_loss(visual, cells)
        outline = reader.silhouette_loss(states[_EARLY_LAYER][:, 1:], silhouettes)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(content + 2 * outline)
        nn.utils.clip_grad_norm_([*tower.parameters(), *projector.parameters(), *reader.parameters()], 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(
                f"sight {step}/{steps} px {pixels.shape[1]} content {content.item():.3f} outline {outline.item():.3f} "
                f"forms right {reader.right_forms(visual, cells):.3f} "
                f"{(time.monotonic() - started) / (step + 1):.3f} s/step",
                flush=True,
            )


def _eased(scene: Scene, ease: float) -> Scene:
    """The scene with its smallest shapes enlarged and its noise reduced, the more so the closer `ease` is to 1."""
    smallest = (0.25 + 0.2 * ease) / GRID
    shapes = tuple(replace(shape, radius=max(shape.radius, smallest)) for shape in scene.shapes)
    return replace(scene, shapes=shapes, noise=scene.noise * (1 - ease))


def _patch_silhouettes(scene: Scene, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """How far shapes cover each patch of the picture at `size` px, at half resolution, [patches, 49]."""
    side = size // PATCH
    covered = np.asarray(silhouette(scene, side * _MASK_SIDE), dtype=np.float32) / 255
    patches = covered.reshape(side, _MASK_SIDE, side, _MASK_SIDE).transpose(0, 2, 1, 3)
    return patches.reshape(side * side, _MASK_SIDE**2)
