"""Fits principal components of visual keys and values to pictures that the model is shown."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from triptych.errors import InvalidRequest
from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.blocks import blocks_for
from triptych.worker.kv.low_rank import Fit, LowRankBasis
from triptych.worker.loading import LoadedModel
from triptych.worker.model.rotary import Rotary, rotate
from triptych.worker.model.step import SequenceRows


def fit_basis(model: LoadedModel, pictures: Iterable[tuple[TokenizedPrompt, Tensor]]) -> LowRankBasis:
    """Returns all directions of visual keys and values, most variance first.

    Args:
        model: A model whose engine has no work: its KV blocks are written over.
        pictures: Prompts of one picture each, and its projected features, [tokens, hidden].

    Raises InvalidRequest when there are fewer visual tokens than directions.
    """
    shape = model.config.decoder
    fit = Fit(shape.layers)
    tokens = 0
    for prompt, features in pictures:
        for layer, (keys, values) in enumerate(visual_kv(model, prompt, features)):
            fit.add(layer, keys, values)
        tokens += len(features)
    if tokens < shape.head_dim:
        raise InvalidRequest(
            f"{tokens} visual tokens are too few to fit {shape.head_dim} directions; show more pictures"
        )
    return fit.basis()


@torch.inference_mode()
def visual_kv(model: LoadedModel, prompt: TokenizedPrompt, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each layer's unrotated keys and values [tokens, kv_heads, head_dim], float32, of one picture."""
    (span,) = prompt.spans
    runner, shape = model.engine.runner, model.config.decoder
    table = range(blocks_for(span.end))
    if len(table) > len(runner.cache.keys[0]):
        raise InvalidRequest(f"a picture of {span.count} tokens does not fit the KV cache; raise kv_cache_bytes")
    embedded = runner.embed(prompt.token_ids[: span.end])
    embedded[span.start :] = features.to(embedded)
    runner.backend.start(embedded, [SequenceRows(span.end, span.end, 0, table)], logits=False)()
    rotary = Rotary(shape.rope, shape.head_dim, span.end, model.device, torch.float32)
    cosines, sines = rotary.at(torch.arange(span.start, span.end, device=model.device))
    for layer_keys, layer_values in zip(runner.cache.keys, runner.cache.values, strict=True):
        keys, values = (
            t[: len(table)].flatten(0, 1)[span.start : span.end].float() for t in (layer_keys, layer_values)
        )
        yield rotate(keys, cosines, -sines), values
