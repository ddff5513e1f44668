"""The order in which cached things are given up."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SecondChance(Generic[K]):
    """Least recently used first, except that what was hit more than once since its last turn gets one more.

    A scan of things that are used once can so not push out what many use. Not thread-safe.
    """

    def __init__(self) -> None:
        self._hits: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._hits)

    def __iter__(self) -> Iterator[K]:
        """Iterates from the least to the most recently used."""
        return iter(self._hits)

    def __contains__(self, key: K) -> bool:
        return key in self._hits

    def add(self, key: K, hits: int = 0) -> None:
        """Puts a key last, as the most recently used; `hits` are those it had before."""
        self._hits.pop(key, None)
        self._hits[key] = hits

    def hit(self, key: K) -> None:
        """Counts a use and puts the key last."""
        self._hits[key] = self._hits.pop(key) + 1

    def remove(self, key: K) -> int:
        """Takes a key out, and returns its hits. Raises KeyError if it is not here."""
        return self._hits.pop(key)

    def pop(self, may_go: Callable[[K], bool] = lambda key: True) -> K | None:
        """Takes out and returns the key whose turn it is among those that `may_go`; None if none may.

        Keys with more than one hit lose their hits and go to the end instead.
        """
        spared: list[K] = []
        victim: K | None = None
        for key, hits in self._hits.items():
            if not may_go(key):
                continue
            if hits <= 1:
                victim = key
                break
            spared.append(key)
        if victim is None and spared:
            victim = spared.pop(0)  # All had their chance.
        for key in spared:
            del self._hits[key]
            self._hits[key] = 0
        if victim is not None:
            del self._hits[victim]
        return victim
