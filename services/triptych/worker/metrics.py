"""What Prometheus scrapes from a worker: what its KV cache holds and how well it serves. docs/metrics.md lists it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.worker.engine.engine import Engine
from triptych.worker.inspection import tier_views

_EVENTS = {
    "hit": ("mm_kv_tier_hits", "KV blocks found in a tier"),
    "miss": ("mm_kv_tier_misses", "KV blocks looked for in a tier in vain"),
    "store": ("mm_kv_tier_stores", "KV blocks stored in a tier"),
    "evict": ("mm_kv_evictions", "KV blocks evicted from a tier for lack of room"),
    "failure": ("mm_kv_load_failures", "KV blocks a tier should have given or taken and could not"),
}


class CacheCollector(Collector):
    """Reads an engine's counts when it is scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        reuse = self._engine.reuse
        visual = GaugeMetricFamily("mm_visual_cache_tiers", "Bytes of visual KV, by tier", labels=["tier"])
        held = GaugeMetricFamily("mm_kv_tier_bytes", "Bytes of KV, by tier and modality", labels=["tier", "modality"])
        events = {
            event: CounterMetricFamily(name, help_text, labels=["tier", "modality"])
            for event, (name, help_text) in _EVENTS.items()
        }
        for tier in tier_views(self._engine):
            visual.add_metric([tier.name], tier.usage.visual_bytes)
            held.add_metric([tier.name, "text"], tier.usage.text_bytes)
            held.add_metric([tier.name, "visual"], tier.usage.visual_bytes)
            for (event, modality), count in tier.usage.counts.items():
                events[event].add_metric([tier.name, modality], count)
        moves = CounterMetricFamily("mm_kv_moves", "KV blocks moved between tiers", labels=["way", "modality"])
        for (way, modality), count in (reuse.hierarchy.moves() if reuse.hierarchy is not None else {}).items():
            moves.add_metric([way, modality], count)
        rate = GaugeMetricFamily("mm_kv_hit_rate", "Share of prompts' tokens whose KV was cached", labels=["modality"])
        tokens = CounterMetricFamily("mm_kv_prompt_tokens", "Tokens of admitted prompts", labels=["modality", "cached"])
        for modality, use in reuse.meter.tokens.items():
            rate.add_metric([modality], use.hit_rate)
            tokens.add_metric([modality, "yes"], use.cached)
            tokens.add_metric([modality, "no"], use.asked - use.cached)
        yield from (visual, held, *events.values(), moves, rate, tokens)


def cache_registry(engine: Engine) -> CollectorRegistry:
    """Returns a registry of an engine's metrics."""
    registry = CollectorRegistry()
    registry.register(CacheCollector(engine))
    return registry
