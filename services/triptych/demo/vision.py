"""From pictures to the vision tower's features, the way LLaVA takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)


def pixels_of(pictures: Iterable[Image.Image], size: int) -> Tensor:
    """Square RGB pictures at `size` px, uint8, [rows, size, size, 3]; bicubic, as CLIP's processor resizes."""
    resized = [picture.resize((size, size), Image.Resampling.BICUBIC) for picture in pictures]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in resized]))


def hidden_states(tower: nn.Module, pixels: Tensor) -> tuple[Tensor, ...]:
    """Every layer's output before the last norm, [rows, 1 + patches, 128], of uint8 pictures."""
    mean, deviation = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_DEVIATION)
    normalised = ((pixels.float() / 255 - mean) / deviation).permute(0, 3, 1, 2).contiguous()
    outputs = tower(normalised, output_hidden_states=True, interpolate_pos_encoding=True)
    states: tuple[Tensor, ...] = outputs.hidden_states
    return states


def vision_features(tower: nn.Module, pixels: Tensor) -> Tensor:
    """What LLaVA takes from the tower: the last layer before its norm, without the class token."""
    return hidden_states(tower, pixels)[-1][:, 1:]
