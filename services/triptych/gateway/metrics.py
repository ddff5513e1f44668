"""What Prometheus scrapes: requests, times and tokens as the gateway sees them. Nothing of a prompt is in any label."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from triptych.v1 import inference_pb2

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class Metrics:
    """One gateway's metrics, in a registry of their own.

    Attributes:
        inside: Requests of /v1 being served.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mm_http_requests",
            "Requests, by route and status; 499: the client left",
            ["route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "mm_http_request_seconds", "Arrival to last byte", ["route"], buckets=_SECONDS, registry=registry
        )
        self.inside = 0
        self.in_flight = Gauge("mm_http_requests_in_flight", "Requests of /v1 being served", registry=registry)
        self.in_flight.set_function(lambda: self.inside)
        self.ttft = Histogram("mm_ttft_seconds", "Arrival to first text", buckets=_SECONDS, registry=registry)
        self.encode = Histogram(
            "mm_vision_encode_seconds", "Encoding of a request's images", buckets=_SECONDS, registry=registry
        )
        self.prefill = Histogram("mm_prefill_seconds", "Prefill of a request", buckets=_SECONDS, registry=registry)
        self.prompt_tokens = Counter("mm_prompt_tokens", "Prompt tokens, by kind", ["kind"], registry=registry)
        self.cached_tokens = Counter(
            "mm_cached_tokens", "Prompt tokens whose KV was in the worker's cache", registry=registry
        )
        self.output_tokens = Counter("mm_output_tokens", "Generated tokens", registry=registry)
        self.degradations = Counter("mm_degradations", "Answers worse than asked, by kind", ["kind"], registry=registry)
        self.stream_errors = Counter(
            "mm_stream_errors", "Streams that ended with an error after they had begun", ["code"], registry=registry
        )


class Recorder:
    """Notes one request's events."""

    def __init__(self, metrics: Metrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._spoken = False

    def note(self, event: inference_pb2.GenerateResponse) -> None:
        """Takes an event as the router sent it."""
        kind = event.WhichOneof("event")
        if kind == "chunk" and not self._spoken:
            self._spoken = True
            self._metrics.ttft.observe(time.monotonic() - self._arrival_s)
        elif kind == "finished":
            self._finished(event.finished)

    def stream_failed(self, code: str) -> None:
        """Takes the end of a stream by an error."""
        self._metrics.stream_errors.labels(code).inc()

    def _finished(self, finished: inference_pb2.Finished) -> None:
        metrics, usage, durations = self._metrics, finished.usage, finished.durations
        metrics.prompt_tokens.labels("text").inc(usage.text_tokens)
        metrics.prompt_tokens.labels("visual").inc(usage.visual_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.output_tokens.inc(usage.output_tokens)
        if durations.HasField("encode"):
            metrics.encode.observe(durations.encode.ToNanoseconds() / 1e9)
        if durations.HasField("prefill"):
            metrics.prefill.observe(durations.prefill.ToNanoseconds() / 1e9)
        for item in finished.degradations:
            kind = inference_pb2.DegradationKind.Name(item.kind).removeprefix("DEGRADATION_KIND_").lower()
            metrics.degradations.labels(kind).inc()
