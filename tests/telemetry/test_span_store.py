"""Spans arrive over OTLP gRPC and over HTTP as JSON, and make one tree."""

import http.client
import io
import json
from urllib.parse import urlsplit

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from rich.console import Console

from triptych.telemetry.span_store import Span, SpanReceiver, SpanStore
from triptych.telemetry.span_tree import roots_of, rows_of, tree_of


def span(name: str, trace_id: str = "t", span_id: str = "", parent: str = "", start_ns: int = 0) -> Span:
    return Span(name, "svc", trace_id, span_id or name, parent, start_ns, start_ns + 1, {})


def post(url: str, body: bytes) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
    return connection.getresponse().status


def test_grpc_and_json_spans_of_one_trace_come_together() -> None:
    with SpanReceiver() as receiver:
        provider = TracerProvider(resource=Resource.create({"service.name": "router"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(receiver.grpc_endpoint, insecure=True)))
        with provider.get_tracer("t").start_as_current_span(
            "encode", attributes={"n": 3, "names": ["a", "b"]}
        ) as outer:
            context = outer.get_span_context()
        trace_id, span_id = format(context.trace_id, "032x"), format(context.span_id, "016x")
        triton = {
            "name": "compute",
            "traceId": trace_id.upper(),
            "spanId": "00000000000000AB",
            "parentSpanId": span_id,
            "startTimeUnixNano": "5",
            "endTimeUnixNano": 7,
            "attributes": [{"key": "model", "value": {"stringValue": "vision"}}],
        }
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "triton"}}]}
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [triton]}]}]}
        assert post(receiver.http_traces_url, json.dumps(body).encode()) == 200
        spans = receiver.store.trace(trace_id)
    assert rows_of(spans) == [
        {"name": "encode", "service": "router", "parent": None},
        {"name": "compute", "service": "triton", "parent": "encode"},
    ]
    encode = next(span for span in spans if span.name == "encode")
    assert encode.attributes == {"n": "3", "names": "a,b"}
    assert encode.duration_s > 0


@pytest.mark.parametrize("body", [b"not json", b'{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}'])
def test_what_is_not_otlp_json_is_refused_and_the_receiver_lives(body: bytes) -> None:
    with SpanReceiver() as receiver:
        assert post(receiver.http_traces_url, body) == 400
        assert post(receiver.http_traces_url, b"{}") == 200


def test_the_store_keeps_the_newest_traces_only() -> None:
    store = SpanStore(max_traces=2)
    store.add(span("a", trace_id=name) for name in ("one", "two", "three"))
    assert store.trace_ids() == ["two", "three"]
    assert store.trace("one") == []


def test_a_span_whose_parent_is_missing_is_a_root() -> None:
    spans = [span("child", parent="gone"), span("grandchild", parent="child")]
    assert [root.name for root in roots_of(spans)] == ["child"]


def test_the_tree_shows_every_span_below_its_parent() -> None:
    spans = [span("late", parent="root", start_ns=9), span("root"), span("early", parent="root", start_ns=2)]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tree_of(spans))
    lines = console.export_text().splitlines()
    assert [word for line in lines for word in ("root", "early", "late") if word in line] == ["root", "early", "late"]
