"""Percentiles, distributions and spreads. Pure."""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Distribution(BaseModel):
    """Many values of one kind, in few numbers."""

    model_config = ConfigDict(frozen=True)

    count: Annotated[int, Field(description="how many values")]
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Spread(BaseModel):
    """One figure over repeated rounds."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: Annotated[float, Field(description="smallest round")]
    high: Annotated[float, Field(description="largest round")]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the value below which `share` (0 to 1) of the ascending values lie, interpolated linearly.

    The same as numpy's default method. Raises ValueError for no values or a share outside [0, 1].
    """
    if not ordered or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(ordered)} values")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Returns the distribution of values in any order; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Returns median, smallest and largest of the rounds' figures; None when there are none."""
    return spread_of(values) if values else None


def spread_of(values: Sequence[float]) -> Spread:
    """The same of at least one figure. Raises ValueError when there are none."""
    ordered = sorted(values)
    return Spread(median=percentile(ordered, 0.5), low=ordered[0], high=ordered[-1])
