"""The KV cache as people and Prometheus see it."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import InvalidRequest
from triptych.v1 import worker_pb2
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.thread import EngineThread
from triptych.worker.kv.hierarchy import Hierarchy
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.tiers.tier import Usage

_DEFAULT_IMAGES = 10
_MOST_IMAGES = 1000


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier, the device included.

    Attributes:
        name: `device`, `host`, `disk` or `remote`.
        usage: What it holds and did.
    """

    name: str
    usage: Usage


def tier_views(engine: Engine) -> Iterator[TierView]:
    """Yields the tiers, nearest first. Takes no lock of the engine: counts may be a step apart."""
    yield TierView("device", engine.reuse.device_usage())
    hierarchy = engine.reuse.hierarchy
    if hierarchy is not None:
        for name, usage in hierarchy.usages().items():
            yield TierView(name, usage)


def report(engine: Engine, max_images: int) -> worker_pb2.CacheReport:
    """Returns the cache as it is now; for the engine's thread. Raises InvalidRequest."""
    if not 0 <= max_images <= _MOST_IMAGES:
        raise InvalidRequest(f"max_images must be within 0 to {_MOST_IMAGES}")
    reuse = engine.reuse
    hierarchy, meter = reuse.hierarchy, reuse.meter
    images = sorted(meter.images.items(), key=lambda pair: pair[1].asked, reverse=True)
    held = reuse.image_bytes()
    return worker_pb2.CacheReport(
        tiers=map(_tier, tier_views(engine)),
        text=worker_pb2.CacheUse(asked_tokens=meter.tokens["text"].asked, cached_tokens=meter.tokens["text"].cached),
        visual=worker_pb2.CacheUse(
            asked_tokens=meter.tokens["visual"].asked, cached_tokens=meter.tokens["visual"].cached
        ),
        images=(
            worker_pb2.CachedImage(
                identity=image,
                asked=count.asked,
                covered=count.covered,
                tier_bytes=held.get(image, {}),
                pinned=hierarchy is not None and image in hierarchy.pinned.images,
            )
            for image, count in images[: max_images or _DEFAULT_IMAGES]
        ),
        moves=(
            worker_pb2.CacheMoves(way=way, modality=modality, blocks=blocks)
            for (way, modality), blocks in sorted((Counter() if hierarchy is None else hierarchy.moves()).items())
        ),
        block_seconds={} if hierarchy is None else hierarchy.cost.figures(),
    )


async def drop(engine: EngineThread, hierarchy: Hierarchy | None, request: worker_pb2.DropCachedRequest) -> int:
    """Forgets an image or everything, in all tiers. Returns how many blocks. Raises InvalidRequest."""
    what = request.WhichOneof("what")
    if what == "identity":
        image = check_identity(request.identity)
        doomed = await engine.call(lambda engine: engine.reuse.dependents(image))
    elif what == "everything" and request.everything:

        def doomed(identity: BlockIdentity) -> bool:
            return True

    else:
        raise InvalidRequest("say what to drop: an image's identity, or everything=true")
    dropped = await engine.call(lambda engine: engine.reuse.drop_from_device(doomed))
    if hierarchy is not None:
        dropped += await asyncio.to_thread(hierarchy.drop, doomed)
        # What was on its way up when the tiers forgot it.
        dropped += await engine.call(lambda engine: engine.reuse.drop_from_device(doomed))
    return dropped


def pin(engine: Engine, request: worker_pb2.PinImageRequest) -> None:
    """Pins an image, or no longer; for the engine's thread. Raises InvalidRequest."""
    image = check_identity(request.identity)
    hierarchy = engine.reuse.hierarchy
    if hierarchy is None:
        raise InvalidRequest("there is no tier below the device to pin an image in; raise kv_host_bytes")
    if request.pinned:
        hierarchy.pin(image)
    else:
        hierarchy.unpin(image)


def check_identity(identity: bytes) -> bytes:
    """Returns an identity of 32 bytes. Raises InvalidRequest for another one."""
    if len(identity) != 32:
        raise InvalidRequest("an image's identity has 32 bytes")
    return identity


def _tier(view: TierView) -> worker_pb2.TierReport:
    usage = view.usage

    def content(modality: str, size_bytes: int) -> worker_pb2.TierContent:
        counts = {event: count for (event, kind), count in usage.counts.items() if kind == modality}
        return worker_pb2.TierContent(
            size_bytes=size_bytes,
            hits=counts.get("hit", 0),
            misses=counts.get("miss", 0),
            stores=counts.get("store", 0),
            evictions=counts.get("evict", 0),
            failures=counts.get("failure", 0),
        )

    return worker_pb2.TierReport(
        name=view.name,
        budget_bytes=usage.budget_bytes,
        blocks=usage.blocks,
        text=content("text", usage.text_bytes),
        visual=content("visual", usage.visual_bytes),
        other_failures=usage.counts.get(("failure", "none"), 0),
    )
