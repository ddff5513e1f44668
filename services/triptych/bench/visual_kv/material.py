"""Stands in for pictures: rows of the right width, whose keys and values a language model can have."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import triptych
from triptych.worker.loading import LoadedModel
from triptych.worker.prompt import Turn

Material = Literal["words", "noise"]
"""`words`: embeddings of real text, as the model was trained on. `noise`: random rows of the same mean and spread."""


def pictures(model: LoadedModel, material: Material, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yields stand-ins for the features of pictures, [tokens, hidden], without end and never twice the same."""
    dice = random.Random(seed)
    ids = _text_ids(model)
    embedding = model.engine.runner.embed(ids).float()
    mean, spread = embedding.mean(0), embedding.std(0)
    generator = torch.Generator().manual_seed(seed)
    while True:
        if material == "noise":
            yield torch.randn(tokens, embedding.shape[1], generator=generator) * spread + mean
        else:
            first = dice.randrange(len(ids) - tokens)
            yield embedding[first : first + tokens]


def _text_ids(model: LoadedModel) -> list[int]:
    """Returns the tokens of this package's own source: text that is wherever this runs."""
    files = sorted(Path(triptych.__file__).parent.rglob("*.py"))[:60]
    text = "\n".join(file.read_text("utf-8") for file in files if "_pb2" not in file.name)
    return list(model.prompts.encode([Turn("user", (text[:200_000],))]).token_ids)
