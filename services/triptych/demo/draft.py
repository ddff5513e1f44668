"""A draft of the vision tower: one layer that imitates the trained tower's four, in the same output space.

What counts is how alike both are behind the projector, where the decoder reads them, so that is what is trained.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPVisionModel, LlavaForConditionalGeneration

from triptych.demo.checkpoint import save, vision_config
from triptych.demo.drawing import NATIVE_SIZE, draw, random_scene
from triptych.demo.scenes import held_out_rng, training_rng
from triptych.demo.vision import pixels_of, vision_features

PEAK_RATE: Final = 2e-3
ROWS: Final = 64

SAVE_EVERY: Final = 100

_FIRST_INDEX: Final = 10_000_000
"""Where the draft's part of the training stream begins, far behind the main training's."""


class _Pictures(Dataset[Tensor]):
    """Batches of pictures by index, uint8, [rows, size, size, 3]."""

    def __init__(self, seed: int, steps: int) -> None:
        self._seed = seed
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Tensor:
        rng = training_rng(self._seed, _FIRST_INDEX + index)
        size = int(rng.choice((NATIVE_SIZE, 84, 56), p=(0.7, 0.15, 0.15)))
        return pixels_of([draw(random_scene(rng)) for _ in range(ROWS)], size)


def distil(target: Path, out: Path, seed: int, steps: int) -> None:
    """Trains a one-layer tower on the features of the checkpoint in `target`; `out` holds the latest state."""
    model = LlavaForConditionalGeneration.from_pretrained(target, dtype=torch.float32).model
    model.eval().requires_grad_(False)
    teacher, projector = model.vision_tower, model.multi_modal_projector
    torch.manual_seed(seed)
    draft = CLIPVisionModel(vision_config(layers=1))
    draft.embeddings.load_state_dict(teacher.embeddings.state_dict())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started = time.monotonic()
    loader = DataLoader(_Pictures(seed, steps), batch_size=None, num_workers=1, prefetch_factor=8)
    for step, pixels in enumerate(loader):
        warmed = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * warmed * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        with torch.no_grad():
            wanted = vision_features(teacher, pixels)
            wanted_projected = projector(wanted)
        given = vision_features(draft, pixels)
        given_projected = projector(given)
        cosine = F.cosine_similarity(given_projected, wanted_projected, dim=-1).mean()
        loss = _distance(given, wanted) + _distance(given_projected, wanted_projected) + (1 - cosine)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            seconds = (time.monotonic() - started) / (step + 1)
            print(f"draft {step}/{steps} loss {loss.item():.4f} cosine {cosine.item():.4f} {seconds:.3f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(out, draft)
    for size in (NATIVE_SIZE, 84, 56):
        print(f"{size} px: mean cosine {similarity(teacher, draft, projector, size):.4f}", flush=True)


def _distance(given: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(given, wanted) / wanted.var()


@torch.no_grad()
def similarity(teacher: nn.Module, draft: nn.Module, projector: nn.Module, size: int, count: int = 200) -> float:
    """Mean cosine similarity of both towers' projected patch features over held-out pictures at `size` px."""
    pixels = pixels_of([draw(random_scene(held_out_rng(index))) for index in range(count)], size)
    given, wanted = (projector(vision_features(tower, pixels)) for tower in (draft, teacher))
    return float(F.cosine_similarity(given, wanted, dim=-1).mean())
