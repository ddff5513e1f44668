"""An image on its way through the vision stage, and the batch it travels in."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from opentelemetry import trace as tracing
from opentelemetry.context import Context

from triptych.errors import TriptychError
from triptych.vision.encoder import Features
from triptych.vision.pool import Flying, Member
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import BatchPlan, Item


@dataclass(slots=True, eq=False)
class Job:
    """An image on its way, from `encode` to its features or its error."""

    item: Item
    pixels: Pixels
    version: str
    deadline_s: float
    trace: Context | None
    features: "asyncio.Future[Features]"
    attempts: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way: those of its jobs that still want it, and the seconds after which its encoder is slow."""

    jobs: list[Job]
    flying: Flying
    member: Member
    slow_s: float
    task: "asyncio.Task[None] | None" = field(default=None)


def deliver(job: Job, features: Features) -> None:
    """Gives a job its features: a copy, or one image in the cache would keep its whole batch in memory."""
    if job.features.done():
        return
    if np.isfinite(features).all():
        job.features.set_result(np.array(features))
    else:
        job.features.set_exception(
            TriptychError("the encoder returned features that are not finite", reason="ENCODER_FAILED")
        )


def describe(jobs: tuple[Job, ...], plan: BatchPlan, started_s: float, member: Member) -> None:
    """Writes on each image's span which batch it was in."""
    for job in jobs:
        tracing.get_current_span(job.trace).set_attributes(
            {
                "triptych.batch.images": len(jobs),
                "triptych.batch.pixels": plan.pixels,
                "triptych.encoder": member.endpoint.address,
                "triptych.queue_ms": round(1000 * (started_s - job.item.arrival_s), 3),
            }
        )
