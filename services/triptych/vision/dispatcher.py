"""Carries out what the vision scheduler plans: queues images, sends batches, hands out features."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.context import Context

from triptych.errors import (
    EncoderChanged,
    IntegrityError,
    InvalidRequest,
    Overloaded,
    StageTimeout,
    TriptychError,
    Unavailable,
)
from triptych.vision.encode_job import Batch, Job, deliver, describe
from triptych.vision.encoder import Features, encode_timeout
from triptych.vision.encoder_spec import EncoderSpec, unready
from triptych.vision.metrics import VisionMetrics
from triptych.vision.pool import EncoderPool, Member
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import BatchPlan, EncodeClass, Item, Limits, VisionQueue, plan_batch, rank_of

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""How many encoders an image is sent to before the failure of the last counts."""

_SLOW_FACTOR, _SLOW_S = 8.0, 1.0
"""With another encoder at hand, a batch is given up after so many times its expected seconds, at least _SLOW_S."""


class ScheduledEncoder:
    """An Encoder that queues images and sends them to the pool in batches bounded by pixels.

    Every image that `encode` takes ends once: with features, an error, or its caller's cancellation; then it is in
    neither queue nor batch. Used from one event loop only.
    """

    def __init__(
        self,
        pool: EncoderPool,
        limits: Limits,
        max_pixels: int,
        max_waiting: int,
        metrics: VisionMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_pixels` is the largest image there is room for; more than `max_waiting` in the queue are refused."""
        self._pool = pool
        self._limits = limits
        self._max_pixels = max_pixels
        self._max_waiting = max_waiting
        self._metrics = metrics or VisionMetrics()
        self._clock = clock
        self._queue = VisionQueue()
        self._jobs: dict[Item, Job] = {}
        self._batches: dict[Job, Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected = 0
        self._count = 0
        self._timer: asyncio.Handle | None = None
        self._metrics.waiting.set_function(lambda: len(self._queue))
        self._metrics.waiting_pixels.set_function(lambda: self._queue.pixels)

    @property
    def spec(self) -> EncoderSpec | None:
        """See Encoder."""
        return self._pool.spec

    @property
    def ready(self) -> bool:
        """See Encoder."""
        return self._pool.ready

    @property
    def waiting(self) -> int:
        """Images in the queue."""
        return len(self._queue)

    async def refresh(self, timeout_s: float) -> bool:
        """See Encoder."""
        ready = await self._pool.refresh(timeout_s)
        now_s = self._clock()
        for member in self._pool.members:
            self._metrics.up.labels(member.endpoint.address).set(member.usable(now_s))
        self._pump()
        return ready

    @contextmanager
    def expect(self) -> Iterator[None]:
        """See Encoder."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            if not self._expected:
                self._pump_soon()

    async def encode(
        self,
        pixels: Pixels,
        timeout_s: float,
        trace: Context | None = None,
        *,
        priority: EncodeClass = EncodeClass.STANDARD,
        version: str | None = None,
    ) -> Features:
        """See Encoder. Refuses at once what would not be done in time."""
        job: Job | None = None
        outcome = "encoded"
        started_s = self._clock()
        try:
            job = self._admit(pixels, timeout_s, trace, priority, version)
            self._enqueue(job)
            self._pump_soon()
            async with asyncio.timeout(timeout_s):
                features = await job.features
        except TimeoutError:
            outcome = "ENCODE_TIMEOUT"
            raise encode_timeout(timeout_s) from None
        except TriptychError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            if job is not None:
                self._forget(job)
            self._metrics.outcomes.labels(outcome).inc()
        self._metrics.encode.observe(self._clock() - started_s)
        return features

    async def close(self) -> None:
        """See Encoder. Images on their way fail."""
        for job in list(self._jobs.values()):
            self._fail(job, unready("the router stops"))
        if self._timer is not None:
            self._timer.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, jobs and batches agree."""
        self._queue.check_integrity()
        if set(self._queue) != set(self._jobs):
            raise IntegrityError("vision scheduler: the queue and its images disagree")
        if any(job in self._batches for job in self._jobs.values()):
            raise IntegrityError("vision scheduler: an image is both waiting and under way")
        if not self._tasks:
            self._pool.check_idle()

    def _admit(
        self, pixels: Pixels, timeout_s: float, trace: Context | None, priority: EncodeClass, version: str | None
    ) -> Job:
        """Returns a new job, not yet queued; raises for one that cannot be done, or not in time."""
        spec = self._pool.spec
        if spec is None or not self._pool.ready:
            raise unready("no Triton is ready")
        height, width = pixels.shape[1:]
        if height * width > self._max_pixels:
            raise InvalidRequest(
                f"the image has {height * width} pixels at the resolution it is to be encoded at, more than "
                f"encode_max_pixels={self._max_pixels}",
                reason="ENCODE_TOO_LARGE",
            )
        if len(self._queue) >= self._max_waiting:
            raise Overloaded(
                f"encode_max_waiting={self._max_waiting} images wait for the encoder; try again later",
                reason="ENCODER_OVERLOADED",
            )
        self._count += 1
        version = version or spec.version
        now_s = self._clock()
        item = Item(
            number=self._count,
            shape=(version, height, width),
            pixels=height * width,
            arrival_s=now_s,
            rank=rank_of(now_s, priority, self._limits.lift_s),
        )
        self._check_wait(item, version, timeout_s)
        future: asyncio.Future[Features] = asyncio.get_running_loop().create_future()
        # When the caller is gone nobody asks for the exception; asking here keeps asyncio from logging it.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return Job(item, pixels, version, now_s + timeout_s, trace, future)

    def _check_wait(self, item: Item, version: str, timeout_s: float) -> None:
        """Raises Overloaded when what is before the image is expected to take longer than it may wait."""
        member = self._pool.choose(version, item.pixels)
        ahead = self._queue.pixels_before(item.rank)
        if member is None or not ahead:
            return
        full = self._limits.full_pixels
        batches = -(-ahead // full) / len(self._pool.serving(version))
        wait_s = self._pool.wait_s(member) + batches * self._pool.seconds_for(member, min(ahead, full))
        if wait_s > timeout_s:
            raise Overloaded(
                f"the encoder is busy for about {wait_s:.1f} s, longer than the {timeout_s:.3g} s that are left "
                "(encode_timeout_s); try again later",
                reason="ENCODER_OVERLOADED",
            )

    def _enqueue(self, job: Job) -> None:
        self._queue.add(job.item)
        self._jobs[job.item] = job

    def _forget(self, job: Job) -> None:
        """Takes a job out of wherever it is; the last to leave a batch stops it."""
        if self._jobs.pop(job.item, None) is not None:
            self._queue.remove(job.item)
        batch = self._batches.pop(job, None)
        if batch is not None:
            batch.jobs.remove(job)
            if not batch.jobs and batch.task is not None:
                batch.task.cancel()

    def _pump_soon(self) -> None:
        """Pumps once everything that is ready to run has run: images of one request arrive together."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Sends what the plan says, until it says to wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while True:
            member, plan = self._plan()
            if member is None or not plan.items:
                break
            self._send(member, plan)
        if plan.wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(plan.wait_s, self._pump)

    def _plan(self) -> tuple[Member | None, BatchPlan]:
        """Returns the next batch and who gets it. Images whose version nobody serves now wait, or fail."""
        for job in list(self._jobs.values()):
            if not any(job.version in member.endpoint.versions for member in self._pool.members):
                self._fail(job, EncoderChanged(f"version {job.version} of the vision encoder is no longer served"))
        runnable = [item for item in self._queue if self._pool.serving(self._jobs[item].version)]
        if not runnable:
            return None, BatchPlan()
        leader = self._jobs[runnable[0]]
        member = self._pool.choose(leader.version, leader.item.pixels)
        assert member is not None  # Its version is served.
        max_images = member.endpoint.versions[leader.version].max_images
        limits = replace(self._limits, max_images=max_images)
        now_s = self._clock()
        return member, plan_batch(runnable, member.flight, limits, now_s, arriving=self._expected > 0)

    def _send(self, member: Member, plan: BatchPlan) -> None:
        jobs = []
        now_s = self._clock()
        for item in plan.items:
            self._queue.remove(item)
            job = self._jobs.pop(item)
            job.attempts += 1
            jobs.append(job)
            self._metrics.queue.observe(now_s - item.arrival_s)
        expected_s = self._pool.wait_s(member) + self._pool.seconds_for(member, plan.pixels)
        flying = self._pool.begin(member, plan.pixels, len(jobs))
        batch = Batch(jobs, flying, member, max(_SLOW_S, _SLOW_FACTOR * expected_s))
        self._batches.update((job, batch) for job in jobs)
        address = member.endpoint.address
        self._metrics.batch_images.observe(len(jobs))
        self._metrics.batch_pixels.observe(plan.pixels)
        self._metrics.flight_pixels.labels(address).inc(plan.pixels)
        batch.task = asyncio.create_task(self._run(batch, plan), name="encode batch")
        self._tasks.add(batch.task)
        batch.task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Batch, plan: BatchPlan) -> None:
        """Sends a batch, then gives each of its jobs features or an error, or puts it back."""
        jobs, member = tuple(batch.jobs), batch.member
        describe(jobs, plan, batch.flying.started_s, member)
        healthy: bool | None = None
        error: TriptychError | None = None
        features: Features | None = None
        try:
            images = [job.pixels for job in jobs]
            timeout_s = self._timeout_s(batch)
            features = await member.endpoint.run(images, jobs[0].version, timeout_s, [job.trace for job in jobs])
            healthy = True
        except TriptychError as failure:
            error = failure
            lost = isinstance(failure, StageTimeout | Unavailable) and not isinstance(failure, EncoderChanged)
            healthy = False if lost else None
        except asyncio.CancelledError:
            error = unready("the router stops")
            # All who waited have given up: on an encoder that hangs?
            healthy = False if self._clock() - batch.flying.started_s > batch.slow_s else None
            raise
        except Exception as failure:
            log.exception("a batch failed")
            error = TriptychError(f"the encoder failed: {type(failure).__name__}", reason="ENCODER_FAILED")
        finally:
            seconds = self._clock() - batch.flying.started_s
            gone = isinstance(error, Unavailable) and healthy is False
            self._pool.end(member, batch.flying, healthy=healthy, lost=gone)
            self._metrics.flight_pixels.labels(member.endpoint.address).dec(plan.pixels)
            if healthy:
                self._metrics.batch_seconds.labels(member.endpoint.address).observe(seconds)
            for index, job in enumerate(jobs):
                if self._batches.pop(job, None) is None:  # Its caller is gone.
                    continue
                if features is not None:
                    deliver(job, features[index])
                elif error is not None:
                    self._retry(job, member, error, shared=len(jobs) > 1)
            self._pump()

    def _timeout_s(self, batch: Batch) -> float:
        """Returns how long the batch may take: while anybody waits, or less where another encoder could do it."""
        left_s = max(0.001, max(job.deadline_s for job in batch.jobs) - self._clock())
        last = any(job.attempts >= _ATTEMPTS for job in batch.jobs)
        alternatives = len(self._pool.serving(batch.jobs[0].version)) > 1
        return min(left_s, batch.slow_s) if alternatives and not last else left_s

    def _retry(self, job: Job, member: Member, error: TriptychError, *, shared: bool) -> None:
        """Puts a job back into its place where another encoder, or being alone, may help; else it fails."""
        elsewhere = any(other is not member for other in self._pool.serving(job.version))
        lost = isinstance(error, StageTimeout | Unavailable | Overloaded) and not isinstance(error, EncoderChanged)
        in_time = self._clock() < job.deadline_s
        if in_time and job.attempts < _ATTEMPTS and lost and elsewhere:
            self._enqueue(job)
        elif in_time and shared and error.reason == "ENCODER_FAILED":
            # Somebody's image may have broken the run: each alone, so that only that one fails.
            job.item = replace(job.item, alone=True)
            self._enqueue(job)
        else:
            self._fail(job, error)

    def _fail(self, job: Job, error: TriptychError) -> None:
        if self._jobs.pop(job.item, None) is not None:
            self._queue.remove(job.item)
        if not job.features.done():
            job.features.set_exception(error)
