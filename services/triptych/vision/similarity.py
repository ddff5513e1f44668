"""How alike the features of two encoders are. Pure."""

from typing import NamedTuple

import numpy as np

from triptych.vision.reduction import Floats


class Similarity(NamedTuple):
    """Cosines between the tokens of two encodings of one image: their mean, and the lowest."""

    mean: float
    lowest: float


def similarity_of(draft: Floats, target: Floats) -> Similarity:
    """Compares [tokens, hidden] with [tokens, hidden], token by token; a token of zeros is like nothing (0)."""
    # In double precision: neither square nor product of two float32 overflows there.
    first, second = draft.astype(np.float64), target.astype(np.float64)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = np.einsum("th,th->t", first, second) / np.where(lengths > 0, lengths, 1)
    return Similarity(float(cosines.mean()), float(cosines.min()))
