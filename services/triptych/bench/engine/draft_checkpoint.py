"""A draft model from the model itself: the same weights with some layers left out."""

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from triptych.errors import InvalidRequest

_TEXT = (
    "The harbour opens at six. Boats longer than twelve metres wait at the outer pier until the master of the port "
    "calls them; smaller boats may enter at once. What is the capital of France? The capital of France is Paris. "
    "Write a short story about a lighthouse keeper who finds a letter in a bottle on the beach one morning."
)


def write_draft(model_dir: Path, layers: int, folder: Path) -> tuple[int, ...]:
    """Writes a checkpoint of `layers` layers of a language model, with its tokenizer. Returns which ones were kept.

    The first and the last stay, and of the others those that change the residual stream most on a short text, by one
    minus the cosine of what goes in and what comes out (block influence, Men et al., ShortGPT, arXiv:2403.03853).
    Nothing is trained afterwards. Raises InvalidRequest unless 2 <= layers <= those of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    present = int(model.config.num_hidden_layers)
    if not 2 <= layers <= present:
        raise InvalidRequest(f"{model_dir.name} has {present} layers; keep 2 to {present} of them, not {layers}")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    influence = _influence(model, torch.tensor([tokenizer(_TEXT)["input_ids"]]))
    inner = sorted(range(1, present - 1), key=lambda layer: influence[layer], reverse=True)
    kept = tuple(sorted((0, *inner[: layers - 2], present - 1)))
    model.model.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in kept)
    model.config.num_hidden_layers = layers
    # A fresh model of the same shape: one that once came from GGUF refuses to be saved.
    draft = type(model)(model.config).to(model.dtype)
    draft.load_state_dict(model.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        draft.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        folder.mkdir(exist_ok=True)
        for part in Path(scratch).iterdir():
            part.replace(folder / part.name)
    return kept


@torch.inference_mode()
def _influence(model: Any, token_ids: Tensor) -> list[float]:
    """Returns each layer's block influence."""
    states = model(input_ids=token_ids, output_hidden_states=True).hidden_states
    return [1 - float(cosine_similarity(a.float(), b.float(), dim=-1).mean()) for a, b in pairwise(states)]
