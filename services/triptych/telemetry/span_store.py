"""A span store for one machine: takes OTLP over gRPC (our services) and over HTTP as JSON (Triton).

For `triptych demo`, `triptych up` and the tests, where no Jaeger runs.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span. Ids are lower-case hex; `parent_id` is empty for a root; times are ns since the epoch."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


class SpanSink(Protocol):
    """Where received spans go. Called from several threads."""

    def add(self, spans: Iterable[Span]) -> None:
        """Takes spans; never fails."""


class SpanStore:
    """Holds the spans it is given, by trace, in order of arrival. Thread-safe. Keeps the newest `max_traces` traces."""

    def __init__(self, max_traces: int = 10_000) -> None:
        self._max_traces = max_traces
        self._traces: dict[str, list[Span]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, spans: Iterable[Span]) -> None:
        """Adds spans; the oldest traces go when there are too many."""
        with self._lock:
            for span in spans:
                self._traces[span.trace_id].append(span)
            while len(self._traces) > self._max_traces:
                del self._traces[next(iter(self._traces))]

    def trace(self, trace_id: str) -> list[Span]:
        """Returns the spans of one trace, by start time; empty when it is unknown."""
        with self._lock:
            return sorted(self._traces.get(trace_id, ()), key=lambda span: span.start_ns)

    def trace_ids(self) -> list[str]:
        """Returns all known traces, oldest first."""
        with self._lock:
            return list(self._traces)


class SpanReceiver:
    """An OTLP endpoint on loopback, gRPC and HTTP/JSON, that fills a store while it is entered.

    Attributes:
        store: Where the spans go unless another `sink` was given.
        grpc_endpoint: For OTEL_EXPORTER_OTLP_ENDPOINT.
        http_traces_url: For exporters that speak OTLP/HTTP JSON (Triton).
    """

    def __init__(self, sink: SpanSink | None = None) -> None:
        self.store = SpanStore()
        sink = self.store if sink is None else sink
        self._grpc = grpc.server(ThreadPoolExecutor(max_workers=4, thread_name_prefix="otlp"))
        add_servicer: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_servicer(_TraceService(sink), self._grpc)
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _json_handler(sink))
        self._http.daemon_threads = True
        self.http_traces_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._http.serve_forever, name="otlp-http", daemon=True)

    def environment(self, export_delay_ms: int = 200) -> dict[str, str]:
        """Returns the variables that make a Triptych service export here, soon after `export_delay_ms`."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.grpc_endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": str(export_delay_ms),
            "TRIPTYCH_TRITON_TRACE_URL": self.http_traces_url,
        }

    def __enter__(self) -> Self:
        self._grpc.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(grace=None).wait()


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, store: SpanSink) -> None:
        self._store = store

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next((a.value.string_value for a in resource.resource.attributes if a.key == "service.name"), "")
            for scope in resource.scope_spans:
                self._store.add(_from_proto(span, service) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def _from_proto(span: trace_pb2.Span, service: str) -> Span:
    return Span(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={a.key: _text_of(a.value) for a in span.attributes},
    )


def _text_of(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ",".join(_text_of(item) for item in value.array_value.values)
    return str(getattr(value, kind)) if kind else ""


def _from_json(span: dict[str, Any], service: str) -> Span:
    """OTLP's JSON has ids in hex and 64-bit numbers as strings."""
    attributes = {a["key"]: str(next(iter(a.get("value", {}).values()), "")) for a in span.get("attributes", ())}
    parent = str(span.get("parentSpanId", "")).lower()
    return Span(
        name=str(span["name"]),
        service=service,
        trace_id=str(span["traceId"]).lower(),
        span_id=str(span["spanId"]).lower(),
        parent_id="" if not parent.strip("0") else parent,
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=attributes,
    )


def _json_handler(store: SpanSink) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                for resource in json.loads(body).get("resourceSpans", ()):
                    attributes = resource.get("resource", {}).get("attributes", ())
                    service = next((a["value"]["stringValue"] for a in attributes if a["key"] == "service.name"), "")
                    for scope in resource.get("scopeSpans", ()):
                        store.add(_from_json(span, service) for span in scope.get("spans", ()))
            except (ValueError, KeyError, TypeError) as error:
                self.send_error(400, f"not OTLP JSON: {type(error).__name__}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Silent: the store is not a service of its own."""

    return Handler
