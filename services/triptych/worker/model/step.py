"""What a step is given and what it gives, whatever computes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Keys that a sequence's rows attend to beside those of its block table; all of them stand before the rows.

    Attributes:
        blocks: Block ids.
        tokens: How many keys they hold; > 0.
        host: Whether the blocks are those of the second cache, in host memory, rather than of the step's own.
        origins: Positions by which the keys turn once they are expanded, [tokens], int32, on the CPU; None unless the
            blocks hold principal components.
        bias: Added to the scores, [layers, tokens rounded up to 16], float32, on the CPU; None adds nothing.
    """

    blocks: Sequence[int]
    tokens: int
    host: bool = False
    origins: Tensor | None = None
    bias: Tensor | None = None


class SequenceRows(NamedTuple):
    """Trailing positions of one sequence.

    Attributes:
        rows: How many positions to compute, more than 0.
        context: Positions in `blocks` up to the last of them, cached ones included.
        logits: For how many of the last rows logits are wanted.
        blocks: Block ids that cover `context`; may be more.
        skipped: Earlier positions of the sequence that are not in `blocks`.
        segment: What stands for those; the sequence then has one row.
    """

    rows: int
    context: int
    logits: int
    blocks: Sequence[int]
    skipped: int = 0
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        logits: [wanted rows, vocabulary], float32, in the order of the sequences; None if not asked for.
        greedy: The first largest logit of each wanted row, [wanted rows], int32; None if not asked for.
        finite: Whether the hidden state of each sequence's last row is finite, [sequences], bool.
    """

    logits: Tensor | None
    greedy: Tensor | None
    finite: Tensor


class StepBackend(Protocol):
    """Something that computes decoder steps over a paged KV cache.

    Attributes:
        input_dtype: Element type in which it wants embeddings.
    """

    input_dtype: torch.dtype

    def start(
        self, embedded: Tensor, sequences: Sequence[SequenceRows], *, logits: bool = True, greedy: bool = False
    ) -> Callable[[], StepResult]:
        """Begins to run all layers over the rows of all sequences, and to write their keys and values into the cache.

        A row attends to all positions of its sequence up to its own. One step runs at a time.

        Returns a function that waits for the result; until it is called, the caller can do something else.

        Args:
            embedded: Token embeddings and features, [tokens, hidden]: the sequences' rows, one after another.
            sequences: Which rows are whose.
            logits: Whether to return logits.
            greedy: Whether to return the most likely tokens.
        """
