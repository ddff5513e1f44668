"""What was measured, and what follows from it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the encoder: images, pixels of all, start and end on time.monotonic's clock, and peak memory in
    bytes above what the idle encoder holds."""

    images: int
    pixels: int
    start_s: float
    end_s: float
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule did.

    Attributes:
        rule: `pixels` or `count`.
        batches: In order.
        latencies_s: Of each image, from the queue to its features.
        seconds: From the first image to the last.
    """

    rule: str
    batches: list[Batch]
    latencies_s: list[float]
    seconds: float

    @property
    def images_per_s(self) -> float:
        """Throughput."""
        return len(self.latencies_s) / self.seconds

    @property
    def mean_batch(self) -> float:
        """Images in a batch, on average."""
        return len(self.latencies_s) / len(self.batches)

    @property
    def peak_bytes(self) -> int:
        """Of all batches, above idle."""
        return max(batch.peak_bytes for batch in self.batches)

    @property
    def variation(self) -> float:
        """Standard deviation of the batches' peaks over their mean, each batch weighted by its time."""
        peaks = np.array([batch.peak_bytes for batch in self.batches], float)
        weights = np.array([batch.end_s - batch.start_s for batch in self.batches])
        mean = np.average(peaks, weights=weights)
        return float(np.sqrt(np.average((peaks - mean) ** 2, weights=weights)) / mean)

    def latency_s(self, share: float) -> float:
        """Returns a quantile of the latencies."""
        return float(np.quantile(self.latencies_s, share))


@dataclass(frozen=True, slots=True)
class Figures:
    """The result.

    Attributes:
        budget: Pixel budget of the first rule: the largest image of the mix.
        per_pixel_bytes, fixed_bytes: What single images told of memory above idle.
        pixels, count: What the two rules did.
        count_limit: Most images in a batch under the second rule, which gives both the same mean batch.
    """

    budget: int
    fixed_bytes: float
    per_pixel_bytes: float
    pixels: Outcome
    count: Outcome
    count_limit: int

    @property
    def predicted_bytes(self) -> float:
        """Memory above idle that a batch as large as the budget is predicted to need."""
        return self.fixed_bytes + self.per_pixel_bytes * self.budget

    def keys(self) -> dict[str, float]:
        """Returns the figures that the last line of `--json` promises."""
        return {
            "peak_memory_ratio_pixels": self.pixels.peak_bytes / self.predicted_bytes,
            "peak_memory_ratio_count": self.count.peak_bytes / self.predicted_bytes,
            "throughput_ratio": self.pixels.images_per_s / self.count.images_per_s,
        }
