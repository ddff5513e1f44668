import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from triptych.triton.relay import HOLD_S, SpanLinker, SpanRelay
from triptych.triton.tracing import Caller, parse_request_id, trace_arguments

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OWN_TRACE = "f" * 32


def span(name: str, parent: str | None = None, request_id: str | None = None, trace_id: str = OWN_TRACE) -> Any:
    attributes = [{"key": "triton.request_id", "value": {"stringValue": request_id}}] if request_id else []
    return {
        "name": name,
        "traceId": trace_id,
        "spanId": f"{name:0>16}",
        "attributes": attributes,
        **({"parentSpanId": parent} if parent is not None else {}),
    }


def request(*spans: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"r": 1}, "scopeSpans": [{"scope": {"s": 1}, "spans": list(spans)}]}]}


def names_and_places(export: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (found["name"], found["traceId"], found.get("parentSpanId", ""))
        for resource in export["resourceSpans"]
        for scope in resource["scopeSpans"]
        for found in scope["spans"]
    ]


def test_the_request_id_carries_the_current_span() -> None:
    context = SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=False, trace_flags=TraceFlags(1))
    arguments = trace_arguments(trace.set_span_in_context(NonRecordingSpan(context)))
    assert parse_request_id(arguments["request_id"]) == (Caller(TRACE, SPAN, sampled=True),)
    assert arguments["headers"]["traceparent"] == arguments["request_id"]


def test_a_batch_names_all_its_callers_and_has_no_header() -> None:
    contexts = [
        trace.set_span_in_context(NonRecordingSpan(SpanContext(number, number, False, TraceFlags(1))))
        for number in (1, 2)
    ]
    arguments = trace_arguments(*contexts, trace.set_span_in_context(trace.INVALID_SPAN))
    assert [caller.span_id for caller in parse_request_id(arguments["request_id"])] == ["0" * 15 + "1", "0" * 15 + "2"]
    assert "headers" not in arguments


def test_nothing_is_sent_when_nothing_is_traced() -> None:
    assert trace_arguments(trace.set_span_in_context(trace.INVALID_SPAN)) == {}


@pytest.mark.parametrize("request_id", ["", "42", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-", f"00-{'x' * 32}"])
def test_other_request_ids_name_no_caller(request_id: str) -> None:
    assert parse_request_id(request_id) == ()


@pytest.mark.parametrize("root", [None, "", "0" * 16])
def test_a_whole_trace_moves_below_the_caller(root: str | None) -> None:
    export = request(span("compute", "model"), span("model", "root", f"00-{TRACE}-{SPAN}-01"), span("root", root))
    linked = SpanLinker().link(export, now=0)
    assert names_and_places(linked) == [
        ("compute", TRACE, "model"),
        ("model", TRACE, "root"),
        ("root", TRACE, SPAN),
    ]
    assert linked["resourceSpans"][0]["resource"] == {"r": 1}


def test_spans_wait_for_the_one_that_names_their_caller() -> None:
    linker = SpanLinker()
    assert names_and_places(linker.link(request(span("compute", "model")), now=0)) == []
    late = linker.link(request(span("model", "root", f"00-{TRACE}-{SPAN}-01")), now=1)
    assert [place[1] for place in names_and_places(late)] == [TRACE, TRACE]
    assert names_and_places(linker.link(request(span("root")), now=2)) == [("root", TRACE, SPAN)]


def test_traces_of_other_clients_pass_unchanged_after_a_while() -> None:
    linker = SpanLinker()
    assert names_and_places(linker.link(request(span("root", request_id="7")), now=0)) == []
    assert names_and_places(linker.link(request(), now=HOLD_S)) == [("root", OWN_TRACE, "")]
    linker.link(request(span("last")), now=HOLD_S)
    assert names_and_places(linker.flush()) == [("last", OWN_TRACE, "")]


def test_spans_of_a_batch_are_in_the_trace_of_each_caller() -> None:
    others = [("1" * 32, "2" * 16, "01"), ("3" * 32, "4" * 16, "00"), ("5" * 32, "6" * 16, "01")]
    batch = ";".join(f"00-{trace_id}-{span_id}-{flags}" for trace_id, span_id, flags in others)
    linked = SpanLinker().link(request(span("model", "root", batch), span("root")), now=0)
    assert names_and_places(linked) == [
        ("model", "1" * 32, "root"),
        ("model", "5" * 32, "root"),
        ("root", "1" * 32, "2" * 16),
        ("root", "5" * 32, "6" * 16),
    ]
    assert "3" * 32 not in str(linked)


def test_spans_of_unsampled_callers_are_dropped() -> None:
    linked = SpanLinker().link(request(span("root", request_id=f"00-{TRACE}-{SPAN}-00")), now=0)
    assert linked == {"resourceSpans": []}


class Collector:
    """Takes what is posted to it."""

    def __init__(self) -> None:
        self.exports: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.exports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def post(url: str, body: bytes) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, data=body)) as response:
        return int(response.status)


def test_the_relay_forwards_at_once_and_the_rest_when_it_closes(collector: Collector) -> None:
    relay = SpanRelay(collector.url)
    known = request(span("root", request_id=f"00-{TRACE}-{SPAN}-01"), span("unknown", trace_id="e" * 32))
    assert post(relay.url, json.dumps(known).encode()) == 200
    assert [names_and_places(export) for export in collector.exports] == [[("root", TRACE, SPAN)]]
    relay.close()
    assert names_and_places(collector.exports[1]) == [("unknown", "e" * 32, "")]


def test_garbage_and_a_missing_collector_do_not_stop_the_relay(caplog: pytest.LogCaptureFixture) -> None:
    relay = SpanRelay("http://127.0.0.1:9/v1/traces")
    for garbage in (b"{", b"[]", b'{"resourceSpans": [1]}'):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(relay.url, garbage)
    for _ in range(2):
        assert post(relay.url, json.dumps(request(span("root", request_id=f"00-{TRACE}-{SPAN}-01"))).encode()) == 200
    relay.close()
    assert sum("spans of Triton are lost" in record.message for record in caplog.records) == 1
