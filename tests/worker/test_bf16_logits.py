"""Logits in bfloat16 beside those of transformers in bfloat16, both against float64 on the same weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.worker.driving import load
from triptych.worker.loading import LoadedModel
from triptych.worker.model.step import SequenceRows

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TOKENS = 96


def logits_of_transformers(token_ids: list[int], dtype: torch.dtype) -> Tensor:
    """Returns [tokens, vocabulary], float64."""
    model = AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.bfloat16).to(dtype)
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits
    return logits[0].double()


def logits_of_ours(model: LoadedModel, token_ids: list[int]) -> Tensor:
    """Returns [tokens, vocabulary], float64, of one step over the whole prompt."""
    runner = model.engine.runner
    rows = SequenceRows(len(token_ids), len(token_ids), len(token_ids), list(range(-(-len(token_ids) // 16))))
    embedded = runner._embedding[torch.tensor(token_ids)].to(runner.backend.input_dtype)
    result = runner.backend.start(embedded, [rows], logits=True)()
    assert result.logits is not None
    return result.logits.double()


@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="models/demo has not been trained")
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_bfloat16_logits_are_as_near_to_float64_as_those_of_transformers(kernels: str) -> None:
    model = load(DEMO, dtype="bfloat16", kernels=kernels)
    token_ids = [5 + 7 * i % 60 for i in range(TOKENS)]
    exact = logits_of_transformers(token_ids, torch.float64)
    theirs = (logits_of_transformers(token_ids, torch.bfloat16) - exact).square().mean().sqrt()
    ours = (logits_of_ours(model, token_ids) - exact).square().mean().sqrt()
    assert 0 < ours <= 1.1 * theirs, (ours, theirs)
