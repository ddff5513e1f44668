"""Teaches two attention heads to look at the shape that a question names.

Told only the right words, the decoder answers "where is the red circle?" with the place of just any shape, and stays
there for many thousands of steps: every other kind of question can be answered from a place, or from the sum of all
that is seen. Heads that are shown where to look open the way; the rest of the model learns to use them by itself.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from triptych.demo.packing import IGNORED, Batch
from triptych.demo.sight import cells_of_patches

LAYER: Final = 2
"""Late enough that the question's words have met, early enough that what is found can still be put into words."""


class Gaze:
    """Watches decoder layer `LAYER` during the model's forward passes: the first query head of each KV head."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        self._image = model.config.image_token_index
        self._layer = model.model.language_model.layers[LAYER]
        self._hidden = torch.empty(0)
        self._rotation = (torch.empty(0), torch.empty(0))
        self._layer.register_forward_pre_hook(self._watch, with_kwargs=True)

    def _watch(self, _: object, positional: tuple[Tensor, ...], named: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._hidden = positional[0]
        self._rotation = named["position_embeddings"]

    def loss(self, batch: Batch) -> Tensor:
        """How little of the heads' attention in the last forward pass went to the sought cells' tokens.

        The mean of -log(attention's share on them) over the heads and all positions that seek a cell; `batch` must be
        the one that was passed.
        """
        attention = self._layer.self_attn
        normed = self._layer.input_layernorm(self._hidden)
        every = attention.num_key_value_groups
        queries = apply_rotary(attention.q_proj(normed), attention.head_dim, self._rotation)[:, ::every]
        keys = apply_rotary(attention.k_proj(normed), attention.head_dim, self._rotation)
        row, position = (batch.sought != IGNORED).nonzero(as_tuple=True)
        scores = torch.einsum("nhd,nhkd->nhk", queries[row, :, position], keys[row]) * attention.scaling
        shares = scores.masked_fill(~batch.visible()[row, :, position], -torch.inf).log_softmax(-1)
        at_image = batch.ids == self._image
        cells = torch.full_like(batch.ids, IGNORED)
        cells[at_image] = cells_of_patches(int(at_image[0].sum())).repeat(len(cells))
        hit = cells[row] == batch.sought[row, position][:, None]
        loss: Tensor = -shares.masked_fill(~hit[:, None], -torch.inf).logsumexp(-1).mean()
        return loss


def apply_rotary(projected: Tensor, width: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Heads of `width`, turned by their positions: [rows, heads, length, width] of [rows, length, heads * width]."""
    heads = projected.view(*projected.shape[:2], -1, width).transpose(1, 2)
    turned: Tensor = apply_rotary_pos_emb(heads, heads, *rotation)[0]
    return turned
