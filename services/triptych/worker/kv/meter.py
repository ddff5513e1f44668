"""How well the KV cache serves: tokens asked for and found, and which images are asked for most."""

from collections import OrderedDict
from dataclasses import dataclass

from triptych.worker.kv.identity import VisualSpan

_MOST_IMAGES = 10_000


@dataclass(slots=True)
class TokenCount:
    """Prompt tokens of one kind: all, and those whose KV was cached."""

    asked: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float:
        """Share that was cached; 0 before the first."""
        return self.cached / self.asked if self.asked else 0.0


@dataclass(slots=True)
class ImageCount:
    """How often an image was part of an admitted prompt, and how often all its tokens were cached."""

    asked: int = 0
    covered: int = 0


class CacheMeter:
    """Counts once for each request, when it is admitted. Memory is bounded: rarely seen images are forgotten.

    Attributes:
        tokens: Counts by kind: `text`, `visual`.
        images: Counts by identity, the latest seen last.
    """

    def __init__(self) -> None:
        self.tokens = {"text": TokenCount(), "visual": TokenCount()}
        self.images: OrderedDict[bytes, ImageCount] = OrderedDict()

    def note(self, tokens: int, spans: tuple[VisualSpan, ...], cached: int) -> None:
        """Takes a prompt of `tokens` positions, of which the first `cached` were found."""
        visual = sum(span.count for span in spans)
        visual_cached = sum(max(0, min(span.end, cached) - span.start) for span in spans)
        self.tokens["visual"].asked += visual
        self.tokens["visual"].cached += visual_cached
        self.tokens["text"].asked += tokens - visual
        self.tokens["text"].cached += cached - visual_cached
        for span in spans:
            count = self.images.setdefault(span.identity, ImageCount())
            count.asked += 1
            count.covered += span.end <= cached
            self.images.move_to_end(span.identity)
        while len(self.images) > _MOST_IMAGES:
            self.images.popitem(last=False)
