"""What Prometheus is told of the vision stage. Nothing of an image but its size is in any label or value."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from triptych.telemetry.metrics import SECONDS

_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PIXELS = tuple(112 * 112 * 4**power for power in range(8))


class VisionMetrics:
    """One router's metrics of its vision stage; docs/metrics.md describes each."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        self.encode = Histogram(
            "mm_vision_encode_seconds", "One image, from the queue to its features", buckets=SECONDS, registry=registry
        )
        self.queue = Histogram(
            "mm_vision_queue_seconds", "One image's wait until its batch left", buckets=SECONDS, registry=registry
        )
        self.batch_seconds = Histogram(
            "mm_vision_batch_seconds", "One batch in an encoder", ["encoder"], buckets=SECONDS, registry=registry
        )
        self.batch_images = Histogram("mm_vision_batch_images", "Images in a batch", buckets=_IMAGES, registry=registry)
        self.batch_pixels = Histogram("mm_vision_batch_pixels", "Pixels in a batch", buckets=_PIXELS, registry=registry)
        self.waiting = Gauge("mm_vision_queue_images", "Images waiting for an encoder", registry=registry)
        self.waiting_pixels = Gauge("mm_vision_queue_pixels", "Pixels waiting for an encoder", registry=registry)
        self.flight_pixels = Gauge(
            "mm_vision_pixels_in_flight", "Pixels in flight, by encoder", ["encoder"], registry=registry
        )
        self.up = Gauge("mm_vision_encoder_up", "Whether an encoder gets work", ["encoder"], registry=registry)
        self.outcomes = Counter(
            "mm_vision_images",
            "Images that came to the scheduler, by outcome: encoded, cancelled, or an error's reason",
            ["outcome"],
            registry=registry,
        )
