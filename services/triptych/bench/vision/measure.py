"""The measurement: one stream of images through a real Triton, batched by pixels, then by count."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from opentelemetry.context import Context

from triptych.bench.vision.figures import Batch, Figures, Outcome
from triptych.bench.vision.memory import MemorySampler, computing_processes, resident_bytes
from triptych.bench.vision.model import MODEL, set_max_images, tile_side, write_repository
from triptych.config import TritonSettings
from triptych.ports import free_ports
from triptych.triton.server import TritonServer
from triptych.vision.dispatcher import ScheduledEncoder
from triptych.vision.encoder import Features, TritonEncoder
from triptych.vision.pool import EncoderPool
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import Flight, Item, Limits, plan_batch

Size = tuple[int, int]

MIX: tuple[tuple[Size, int], ...] = (
    ((112, 112), 24),
    ((336, 336), 24),
    ((640, 480), 20),
    ((1280, 720), 16),
    ((1920, 1080), 10),
    ((3840, 2160), 6),
)
"""Sizes of images (width, height) and how many of a hundred have them."""

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        checkpoint: Whose ViT encodes the tiles.
        images: How many images each rule encodes.
        outstanding: How many are in queue and encoder at any time.
        seed: Equal seeds send equal images in equal order.
    """

    checkpoint: Path
    images: int = 200
    outstanding: int = 32
    seed: int = 0


class RecordingEncoder(TritonEncoder):
    """Notes when each batch was in Triton."""

    batches: list[Batch]

    async def run(
        self, images: Sequence[Pixels], version: str, timeout_s: float, traces: Sequence[Context | None] = ()
    ) -> Features:
        """See Endpoint."""
        start_s = time.monotonic()
        features = await super().run(images, version, timeout_s, traces)
        pixels = sum(image[0].size for image in images)
        self.batches.append(Batch(len(images), pixels, start_s, time.monotonic()))
        return features


@dataclass(slots=True)
class Bench:
    """A plan and the repository that it is measured with."""

    plan: Plan
    repository: Path
    side: int
    status: Callable[[str], None] = field(default=lambda text: None)

    def sizes(self) -> list[Size]:
        """Returns the sizes of all images, height before width, in whole tiles, in the order in which they are sent."""
        weights = [weight for _, weight in MIX]
        chosen = random.Random(self.plan.seed).choices([size for size, _ in MIX], weights, k=self.plan.images)
        return [self.tiled(size) for size in chosen]

    def tiled(self, size: Size) -> Size:
        """Returns (height, width) rounded to whole tiles."""
        width, height = (max(1, round(length / self.side)) * self.side for length in size)
        return height, width

    def calibrate(self) -> tuple[float, float]:
        """Returns fixed and per-pixel bytes above idle, from images encoded one by one."""
        self.status("calibrating: images one by one")
        sizes = [self.tiled(size) for size, _ in MIX for _ in range(3)]
        outcome = self.run("single", sizes, budget=1, max_images=1, outstanding=1)
        pixels = [batch.pixels for batch in outcome.batches]
        slope, fixed = np.polyfit(pixels, [batch.peak_bytes for batch in outcome.batches], 1)
        return max(0.0, float(fixed)), float(slope)

    def run(self, rule: str, sizes: list[Size], budget: int, max_images: int, outstanding: int) -> Outcome:
        """Returns what a fresh Triton did with the images under a rule."""
        set_max_images(self.plan.checkpoint, self.repository, max_images)
        grpc, http, metrics = free_ports(3)
        settings = TritonSettings(
            model_repository=self.repository, grpc_port=grpc, http_port=http, metrics_port=metrics, control_mode="none"
        )
        with TritonServer(settings) as server:
            assert server.pid is not None  # It has been started.
            return asyncio.run(
                self._drive(rule, sizes, budget, outstanding, server.grpc_address, computing_processes(server.pid))
            )

    async def _drive(
        self, rule: str, sizes: list[Size], budget: int, outstanding: int, address: str, pids: list[int]
    ) -> Outcome:
        endpoint = RecordingEncoder(address, MODEL)
        endpoint.batches = []
        # One batch at a time, so that its memory can be told from the next one's.
        limits = Limits(budget, max_inflight=1, batch_timeout_s=0.005, lift_s=1.0)
        encoder = ScheduledEncoder(EncoderPool([endpoint]), limits, max_pixels=1 << 40, max_waiting=1 << 20)
        await encoder.refresh(10.0)
        random_pixels = {size: np.random.default_rng(0).random((3, *size), np.float32) for size in set(sizes)}
        smallest = min(random_pixels.values(), key=lambda pixels: pixels.size)
        await encoder.encode(smallest, TIMEOUT_S)  # First-call costs belong to neither rule.
        endpoint.batches.clear()
        idle_bytes = resident_bytes(pids)
        gate = asyncio.Semaphore(outstanding)
        latencies_s: list[float] = []

        async def one(size: Size) -> None:
            async with gate:
                start_s = time.monotonic()
                await encoder.encode(random_pixels[size], TIMEOUT_S)
                latencies_s.append(time.monotonic() - start_s)
                self.status(f"{rule}: {len(latencies_s)} of {len(sizes)} images")

        sampler = MemorySampler(pids)
        with sampler.running():
            start_s = time.monotonic()
            await asyncio.gather(*(one(size) for size in sizes))
            seconds = time.monotonic() - start_s
        await encoder.close()
        batches = [
            Batch(b.images, b.pixels, b.start_s, b.end_s, max(0, sampler.peak(b.start_s, b.end_s) - idle_bytes))
            for b in endpoint.batches
        ]
        return Outcome(rule, batches, latencies_s, seconds)


def mean_batch(sizes: list[Size], outstanding: int, limits: Limits) -> float:
    """Returns the mean number of images in a batch when so many images are always waiting or under way.

    That needs no encoder: with one batch at a time, only the plans decide.
    """
    items = [Item(number, size, size[0] * size[1], 0.0, 0.0) for number, size in enumerate(sizes)]
    waiting, coming = items[:outstanding], items[outstanding:]
    batches = 0
    while waiting:
        batch = plan_batch(waiting, Flight(), limits, 0.0, arriving=False).items
        waiting = [item for item in waiting if item not in batch] + coming[: len(batch)]
        coming = coming[len(batch) :]
        batches += 1
    return len(sizes) / batches


def equal_count(sizes: list[Size], outstanding: int, budget: int) -> int:
    """Returns the bound by count whose mean batch is nearest to that of a pixel budget."""
    wanted = mean_batch(sizes, outstanding, Limits(budget, 1, 0.0, 0.0))
    unbounded = 1 << 40
    return min(
        range(1, outstanding + 1),
        key=lambda count: abs(
            mean_batch(sizes, outstanding, Limits(unbounded, 1, 0.0, 0.0, max_images=count)) - wanted
        ),
    )


def measure(plan: Plan, status: Callable[[str], None] = lambda text: None) -> Figures:
    """Runs the stream under both rules, each in a fresh Triton; minutes."""
    # What is freed goes back at once, so that a batch's memory is its own and not what the one before left behind.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        status("writing the encoder")
        repository = Path(folder) / "model_repository"
        write_repository(plan.checkpoint, repository)
        bench = Bench(plan, repository, tile_side(plan.checkpoint), status)
        fixed, per_pixel = bench.calibrate()
        sizes = bench.sizes()
        budget = max(height * width for height, width in map(bench.tiled, (size for size, _ in MIX)))
        pixels = bench.run("pixels", sizes, budget, max_images=1 << 20, outstanding=plan.outstanding)
        limit = equal_count(sizes, plan.outstanding, budget)
        count = bench.run("count", sizes, 1 << 40, max_images=limit, outstanding=plan.outstanding)
    return Figures(budget, fixed, per_pixel, pixels, count, limit)
