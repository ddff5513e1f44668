"""When requests arrive: at a rate, whatever the server does, or as fast as a number of clients get answers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Closed loop: `clients` senders, each sending its next request when the last is answered.

    A burst runs at once beside the others, so that for its time there are more requests than senders.
    """

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} at once"


@dataclass(frozen=True, slots=True)
class Rate:
    """Open loop: Poisson arrivals of `per_s` conversations a second on average, a burst counting as its members."""

    per_s: float

    def __str__(self) -> str:
        return f"{self.per_s:g}/s"


Pacing = Concurrency | Rate


def poisson_times(per_s: float, count: int, seed: int) -> list[float]:
    """Returns `count` increasing arrival times in seconds, the first after an exponential gap of mean 1 / per_s.

    Equal arguments give equal times; for one seed, the times scale with 1 / per_s. Raises ValueError unless per_s > 0.
    """
    if not per_s > 0:
        raise ValueError(f"a rate must be positive, got {per_s}")
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return [float(time) / per_s for time in np.cumsum(gaps)]
