"""Training batches: one picture, several independent questions behind it, in one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from numpy.random import Generator
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from triptych.demo.dialogues import SYSTEM_PROMPTS, Dialogue, Kind, Turn, dialogue, without_image
from triptych.demo.drawing import NATIVE_SIZE, Scene, draw, random_scene
from triptych.demo.scenes import held_out_rng, training_rng
from triptych.demo.sight import cell_classes
from triptych.demo.tokens import ASSISTANT, END, IMAGE, PAD, SPECIALS, SYSTEM, USER, token_id
from triptych.demo.vision import pixels_of

IGNORED: Final = -100
"""Label of a position that carries no loss."""


class Segment(NamedTuple):
    """Token ids, whether they are an answer, which the model is to learn, and the cell that answer has to find."""

    ids: list[int]
    taught: bool = False
    cell: int | None = None


BRANCHES: Final = 8

_SIZES: Final = ((NATIVE_SIZE, 0.7), (84, 0.1), (70, 0.1), (56, 0.1))
_DRAWN_AT: Final = ((112, 0.7), (224, 0.25), (448, 0.05))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed dialogues; branch 0 is the part that a row's branches share.

    Attributes:
        pixels: Pictures, uint8, [rows, size, size, 3].
        ids: Token ids, [rows, length].
        positions: Rotary positions, [rows, length]; they restart after the shared part in every branch.
        branches: Branch of each token, [rows, length]; padding is -1.
        sees: Whether a token may look at the shared part, [rows, length].
        labels: The next token where it belongs to an answer, else `IGNORED`, [rows, length].
        sought: The grid cell that the next token's choice depends on where only its content is given, else `IGNORED`,
            [rows, length].
        cells: What each grid cell shows, 0 for nothing, [rows, 9].
    """

    pixels: Tensor
    ids: Tensor
    positions: Tensor
    branches: Tensor
    sees: Tensor
    labels: Tensor
    sought: Tensor
    cells: Tensor

    def visible(self) -> Tensor:
        """The attention mask, bool, [rows, 1, length, length]: causal, own branch, and the shared part if seen."""
        own = self.branches[:, :, None] == self.branches[:, None, :]
        shared = (self.branches[:, None, :] == 0) & self.sees[:, :, None]
        causal = torch.ones(self.ids.shape[1], self.ids.shape[1], dtype=torch.bool).tril()
        return ((own | shared) & causal)[:, None]


class _Row:
    """One sequence in the making."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.branches: list[int] = []
        self.sees: list[bool] = []
        self.labels: list[int] = []
        self.sought: list[int] = []
        self.shared = 0

    def add(self, branch: int, segments: list[Segment], *, sees: bool) -> None:
        """Appends a branch; branch 0 must come first."""
        ids = [token for segment in segments for token in segment.ids]
        taught = [segment.taught for segment in segments for _ in segment.ids]
        cells = [IGNORED if segment.cell is None else segment.cell for segment in segments for _ in segment.ids]
        start = self.shared if branch > 0 and sees else 0
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.branches += [branch] * len(ids)
        self.sees += [sees] * len(ids)
        self.labels += [token if answer else IGNORED for token, answer in zip(ids[1:], taught[1:], strict=True)]
        self.labels.append(IGNORED)
        self.sought += [*cells[1:], IGNORED]
        if branch == 0:
            self.shared = len(ids)


class Packer:
    """Turns scenes into batches; every batch follows from the seed and its index alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, rows: int) -> None:
        self._seed = seed
        self._rows = rows
        self._special = {name: token_id(tokenizer, name) for name in SPECIALS}
        self._encode = tokenizer.backend_tokenizer.encode

    def training_batch(self, index: int) -> Batch:
        """Batch `index` of the training stream: mixed resolutions, wordings, orders of text and picture."""
        rng = training_rng(self._seed, index)
        size = _weighted(_SIZES, rng)
        patches = (size // 14) ** 2
        scenes = [random_scene(rng) for _ in range(self._rows)]
        rows = []
        for scene in scenes:
            row = _Row()
            told = [dialogue(scene, rng, _hard_kind(rng)) for _ in range(BRANCHES)]
            if rng.random() < 0.06:
                self._add_text_first(row, told[0], patches, rng)
            else:
                self._add_shared(row, patches, _system(rng))
                for branch, each in enumerate(told, start=1):
                    self._add_branch(row, branch, each, sees=True)
            if rng.random() < 0.12:
                self._add_branch(row, BRANCHES + 1, without_image(rng, told[-1]), sees=False, system=_system(rng))
            rows.append(row)
        pictures = [draw(scene, _weighted(_DRAWN_AT, rng)) for scene in scenes]
        return self._pack(rows, scenes, pictures, size)

    def held_out_batch(self, first: int, size: int) -> tuple[Batch, list[Dialogue]]:
        """Held-out examples `first`, `first + 1`, … at `size` px, one dialogue a row, just as `held_out` has them."""
        scenes, told, rows = [], [], []
        for index in range(first, first + self._rows):
            rng = held_out_rng(index)
            scene = random_scene(rng)
            scenes.append(scene)
            told.append(dialogue(scene, rng))
            row = _Row()
            self._add_shared(row, (size // 14) ** 2, None)
            self._add_branch(row, 1, told[-1], sees=True)
            rows.append(row)
        return self._pack(rows, scenes, [draw(scene) for scene in scenes], size), told

    def _add_shared(self, row: _Row, patches: int, system: str | None) -> None:
        picture = Segment([self._special[USER]] + [self._special[IMAGE]] * patches)
        row.add(0, [*self._system(system), picture], sees=True)

    def _add_branch(self, row: _Row, branch: int, told: Dialogue, *, sees: bool, system: str | None = None) -> None:
        segments: list[Segment] = [] if sees else [*self._system(system), Segment([self._special[USER]])]
        for number, turn in enumerate(told.turns):
            segments.append(Segment(([self._special[USER]] if number else []) + self._text(turn.question)))
            segments += self._answer(turn)
        row.add(branch, segments, sees=sees)

    def _add_text_first(self, row: _Row, told: Dialogue, patches: int, rng: Generator) -> None:
        turn = told.turns[0]
        asked = [self._special[USER], *self._text(turn.question), *[self._special[IMAGE]] * patches]
        row.add(0, [*self._system(_system(rng)), Segment(asked), *self._answer(turn)], sees=True)

    def _system(self, prompt: str | None) -> list[Segment]:
        if prompt is None:
            return []
        return [Segment([self._special[SYSTEM], *self._text(prompt), self._special[END]])]

    def _answer(self, turn: Turn) -> list[Segment]:
        return [
            Segment([self._special[END], self._special[ASSISTANT]]),
            Segment([*self._text(turn.answer), self._special[END]], taught=True, cell=turn.cell),
        ]

    def _text(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)

    def _pack(self, rows: list[_Row], scenes: list[Scene], pictures: list[Image.Image], size: int) -> Batch:
        length = -(-max(len(row.ids) for row in rows) // 8) * 8

        def padded(lists: list[list[int]], fill: int) -> Tensor:
            return torch.tensor([values + [fill] * (length - len(values)) for values in lists])

        return Batch(
            pixels=pixels_of(pictures, size),
            ids=padded([row.ids for row in rows], self._special[PAD]),
            positions=padded([row.positions for row in rows], 0),
            branches=padded([row.branches for row in rows], -1),
            sees=padded([[int(see) for see in row.sees] for row in rows], 0).bool(),
            labels=padded([row.labels for row in rows], IGNORED),
            sought=padded([row.sought for row in rows], IGNORED),
            cells=torch.tensor([cell_classes(scene) for scene in scenes]),
        )


def _hard_kind(rng: Generator) -> Kind | None:
    """The kind for one branch: in half the cases one that takes longest to learn, else (None) by the usual shares."""
    hard: tuple[Kind, ...] = ("where", "where", "count", "count", "follow_up")
    return hard[int(rng.integers(len(hard)))] if rng.random() < 0.5 else None


def _system(rng: Generator) -> str | None:
    return str(rng.choice(SYSTEM_PROMPTS)) if rng.random() < 0.1 else None


def _weighted(choices: tuple[tuple[int, float], ...], rng: Generator) -> int:
    return choices[int(rng.choice(len(choices), p=[share for _, share in choices]))][0]
