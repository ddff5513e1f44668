"""Merging of similar tokens' keys and values (Bolya et al., Token Merging, arXiv:2210.09461), several layers at a time.

Keys are averaged as they are, rotated: the score of a mean key is the mean of the scores, so positions stay right to
first order. A merged token counts as often as the tokens it stands for once log(count) is added to its score.
"""

import torch
from torch import Tensor

_SHARE = 8
"""At most one in so many tokens is merged away at once: with half of them at once, dissimilar ones would have to go."""


def merge_tokens(keys: Tensor, values: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merges the most similar tokens of each layer, two at a time, until `target` are left.

    Args:
        keys: Rotated, [layers, tokens, kv_heads, head_dim], float32.
        values: The same shape.
        target: 1 to tokens.

    Returns:
        Merged keys and values [layers, target, kv_heads, head_dim], in the order of the tokens, and how many tokens
        each stands for, [layers, target].
    """
    sizes = keys.new_ones(keys.shape[:2])
    # Keys and values weigh the same in what counts as similar.
    scales = [t.pow(2).mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-12) for t in (keys, values)]
    rows = torch.cat(((keys / scales[0]).flatten(2), (values / scales[1]).flatten(2)), -1)
    while rows.shape[1] > target:
        rows, sizes = _merge_once(rows, sizes, min(rows.shape[1] - target, -(-rows.shape[1] // _SHARE)))
    merged = (part.reshape(len(keys), target, *keys.shape[2:]) for part in rows.chunk(2, -1))
    return next(merged) * scales[0], next(merged) * scales[1], sizes


def _merge_once(rows: Tensor, sizes: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Merges at most `most` of every other token, each into the token among the rest that costs least."""
    places = torch.arange(rows.shape[1], device=rows.device)
    givers, takers = places[1::2], places[::2]
    giving, taking = sizes[:, givers, None], sizes[:, None, takers]
    # What merging two groups adds to the sum of squared distances from their means (Ward, 1963).
    distances = torch.cdist(rows[:, givers], rows[:, takers]).pow(2)
    cost, best = (distances * giving * taking / (giving + taking)).min(-1)
    chosen = cost.argsort(-1)[:, :most]
    gone, into = givers[chosen], takers[best.gather(1, chosen)]
    sums = rows * sizes[..., None]
    width = (-1, -1, rows.shape[-1])
    sums = sums.scatter_add(1, into[..., None].expand(width), sums.gather(1, gone[..., None].expand(width)))
    counts = sizes.scatter_add(1, into, sizes.gather(1, gone))
    kept = torch.ones_like(sizes, dtype=torch.bool).scatter_(1, gone, False)
    left = (len(rows), rows.shape[1] - gone.shape[1])
    return (sums / counts[..., None])[kept].view(*left, -1), counts[kept].view(left)
