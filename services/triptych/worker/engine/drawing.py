"""Draws tokens from whole batches of distributions without sorting a vocabulary.

A sort of 49,152 probabilities takes milliseconds a row, as long as a step of a small model. Where nothing is filtered,
order does not matter, so the cumulative sum is inverted in order of ids, first over pieces, then within one. Where
top-k or top-p filters, only the tokens that can pass are sorted.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_PIECE = 256


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Returns one token per row, [rows, 1].

    Args:
        probabilities: [rows, vocabulary], float32; each row sums to about 1.
        noise: [rows, 1], in [0, 1).
    """
    pieces = _pieces_of(probabilities)
    cumulative = pieces.sum(dim=-1).cumsum(dim=-1)
    wanted = noise * cumulative[:, -1:]
    piece = (cumulative <= wanted).sum(dim=-1, keepdim=True)
    before = pad(cumulative, (1, 0)).gather(-1, piece)
    inside = pieces.gather(1, piece[:, :, None].expand(-1, -1, _PIECE))[:, 0]
    return piece * _PIECE + _invert(inside, wanted - before)


def draw_filtered(probabilities: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Returns one token per row, [rows, 1], from what top-k and then top-p leave of each distribution.

    Args:
        probabilities: [rows, vocabulary], float32; each row sums to about 1.
        top_k: [rows, 1], int64; 0 keeps all.
        top_p: [rows, 1], float32; 1 keeps all.
        noise: [rows, 1], in [0, 1).
    """
    ordered, tokens = _sorted_above(probabilities, _least_that_passes(probabilities, top_k, top_p))
    place = torch.arange(ordered.shape[-1], device=ordered.device)
    limited = top_k > 0
    ordered = ordered.masked_fill(limited & (place >= top_k), 0.0)
    ordered = torch.where(limited, ordered / ordered.sum(dim=-1, keepdim=True), ordered)
    # A token is kept while the more likely ones have not reached top_p; the first always is.
    ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= top_p, 0.0)
    return tokens.gather(-1, _invert(ordered, noise * ordered.sum(dim=-1, keepdim=True)))


def _invert(probabilities: Tensor, wanted: Tensor) -> Tensor:
    """Returns the first place whose cumulative sum exceeds `wanted` [rows, 1], or the last that is possible."""
    place = torch.arange(probabilities.shape[-1], device=probabilities.device)
    last = torch.where(probabilities > 0, place, 0).amax(dim=-1, keepdim=True)
    return (probabilities.cumsum(dim=-1) <= wanted).sum(dim=-1, keepdim=True).minimum(last)


def _least_that_passes(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns a bound for each row, [rows, 1], below which no token passes its filters.

    At least k tokens are no less likely than the k-th largest of the pieces' largest. Tokens less likely than
    (1 - top_p) / vocabulary have less than 1 - top_p together, so they stand behind all that top-p keeps; half of that
    leaves room for rounding.
    """
    peaks = _pieces_of(probabilities).amax(dim=-1).sort(dim=-1, descending=True).values
    of_k = peaks.gather(-1, (top_k - 1).clamp(0, peaks.shape[-1] - 1))
    of_k = torch.where(top_k <= peaks.shape[-1], of_k, 0.0)
    of_p = (1 - top_p) / (2 * probabilities.shape[-1])
    return torch.where(top_k > 0, of_k, of_p)


def _sorted_above(probabilities: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's probabilities from `bound` on and their tokens, largest first, zeros behind."""
    rows, tokens = (probabilities >= bound).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(probabilities))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(probabilities), int(counts.max()))
    found, ids = probabilities.new_zeros(shape), tokens.new_zeros(shape)
    found[rows, places] = probabilities[rows, tokens]
    ids[rows, places] = tokens
    ordered, order = found.sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def _pieces_of(probabilities: Tensor) -> Tensor:
    """Returns rows cut into pieces, [rows, pieces, _PIECE], zeros behind."""
    missing = -probabilities.shape[-1] % _PIECE
    return (pad(probabilities, (0, missing)) if missing else probabilities).view(len(probabilities), -1, _PIECE)
