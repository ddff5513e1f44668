"""What Prometheus is told of the router: admission, look-ups, and the vision stage."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from triptych.v1 import inference_pb2
from triptych.vision.metrics import VisionMetrics


class RouterMetrics:
    """One router's metrics, in a registry of their own; docs/metrics.md describes each."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.vision = VisionMetrics(registry)
        self.requests = Gauge("mm_router_requests", "Requests in flight", registry=registry)
        self.lookups = Counter(
            "mm_image_lookups",
            "Images by look-up (kv, embedding, encoder) and outcome (hit, miss)",
            ["lookup", "outcome"],
            registry=registry,
        )
        self.resolutions = Counter(
            "mm_image_resolutions", "Images by resolution and why", ["detail", "reason"], registry=registry
        )
        self.drafts = Counter(
            "mm_vision_drafts",
            "Requests begun with a draft encoder, by what became of it",
            ["outcome"],
            registry=registry,
        )
        self.held_bytes = Gauge(
            "mm_router_held_bytes", "Pixels and features of requests without a first token", registry=registry
        )
        self.cache_bytes = Gauge("mm_encoder_cache_bytes", "Bytes in the encoder cache", registry=registry)
        self.hit_rate = Gauge(
            "mm_visual_cache_hit_rate", "Share of all images so far that needed no encoder", registry=registry
        )
        self._images = self._hits = 0

    def note_source(self, source: int) -> None:
        """Takes where one image's features came from, an inference_pb2.FeatureSource; dropped images do not count."""
        if source == inference_pb2.FEATURE_SOURCE_UNSPECIFIED:
            return
        kv = source == inference_pb2.FEATURE_SOURCE_KV_CACHE
        embedding = source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
        self.lookups.labels("kv", "hit" if kv else "miss").inc()
        if not kv:
            self.lookups.labels("embedding", "hit" if embedding else "miss").inc()
        if not kv and not embedding:
            self.lookups.labels("encoder", "hit").inc()
        self._images += 1
        self._hits += kv or embedding
        self.hit_rate.set(self._hits / self._images)
