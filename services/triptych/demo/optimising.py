"""The optimiser and the learning-rate schedule that every stage of training shares."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

WARM_UP_STEPS: Final = 150


def adamw(peak: float, *modules: nn.Module) -> torch.optim.AdamW:
    """AdamW that decays matrices only; fused, which matters on a CPU."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": 0.05},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Sets the learning rate of `step` of `steps`: linear warm-up, then a cosine down to a fiftieth of the peak."""
    warm_up = min(WARM_UP_STEPS, steps // 10 + 1)
    rate = peak * (step + 1) / warm_up
    if step >= warm_up:
        done = (step - warm_up) / max(1, steps - warm_up)
        rate = peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
    for group in optimizer.param_groups:
        group["lr"] = rate
