"""Sequences in the order in which they get their turn."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

from triptych.errors import IntegrityError
from triptych.worker.engine.sequence import Rank, Sequence


class AgingQueue:
    """Sequences ordered by rank: priority class, lifted by waiting; then age.

    A rank never changes, so a sequence that is preempted returns to its old place, and the first in the queue can be
    overtaken only by requests that arrive within `max_wait_s` for each class between them: nobody starves.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates from the first in turn to the last."""
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._place(sequence)
        return place < len(self._sequences) and self._sequences[place] is sequence

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into its place."""
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out. Raises IntegrityError if it is not here."""
        if sequence not in self:
            raise IntegrityError("a sequence was removed from a queue that does not hold it")
        del self._sequences[self._place(sequence)]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the sequences are in order and each is here once."""
        ranks = [sequence.rank for sequence in self._sequences]
        if any(second <= first for first, second in pairwise(ranks)):
            raise IntegrityError("a queue is out of order")

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.rank, key=_rank)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
