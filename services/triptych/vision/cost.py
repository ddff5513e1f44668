"""How long a batch takes in one encoder, learnt from the batches before."""

_DECAY = 0.9


class CostModel:
    """Seconds as a fixed part and a part per pixel, fitted by least squares over recent batches.

    Older batches fade by a tenth with each new one. Batches of one size alone do not tell the two parts apart: the
    whole is then taken for fixed, which guesses too little for larger batches rather than refusing work on no evidence.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._pixels = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._products = 0.0

    def note(self, pixels: int, seconds: float) -> None:
        """Takes one finished batch."""
        self._weight = self._weight * _DECAY + 1
        self._pixels = self._pixels * _DECAY + pixels
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + pixels * pixels
        self._products = self._products * _DECAY + pixels * seconds

    def predict(self, pixels: int) -> float | None:
        """Returns the seconds that a batch of so many pixels takes; None before the first one."""
        if not self._weight:
            return None
        mean_pixels, mean_seconds = self._pixels / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_pixels**2
        slope = 0.0
        if variance > 1e-6 * mean_pixels**2:
            slope = max(0.0, (self._products / self._weight - mean_pixels * mean_seconds) / variance)
        # Neither part is negative: a line through the origin and the mean where the fit says so.
        slope = min(slope, mean_seconds / mean_pixels)
        return mean_seconds + slope * (pixels - mean_pixels)
