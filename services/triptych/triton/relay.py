"""Stands between Triton and the OTLP collector and joins Triton's spans to the traces they belong to.

Why that is needed: see `tracing`. Spans go in and out as OTLP/HTTP JSON. Nothing here is on a request's path: Triton
exports in batches from a thread of its own.
"""

import argparse
import contextlib
import json
import logging
import signal
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from triptych.config import TritonSettings
from triptych.telemetry.logs import setup_logging
from triptych.triton.tracing import Caller, parse_request_id

log = logging.getLogger(__name__)

HOLD_S = 5.0
"""How long spans wait for the span that names their caller. Triton may split a trace over two exports."""

REMEMBERED_TRACES = 10_000
"""How many of Triton's own trace ids are remembered, so that late spans of a trace find their caller."""

FORWARD_TIMEOUT_S = 5.0

REQUEST_ID = "triton.request_id"
"""The attribute in which Triton writes a request's id on its spans."""

Span = dict[str, Any]


class SpanLinker:
    """Rewrites trace ids and root parents of Triton's spans. Pure but for its memory; not thread-safe.

    A trace of Triton's is known once one of its spans carries a request id that `trace_arguments` made; then all its
    spans move into the caller's trace and its root becomes the caller span's child; a batch's spans are copied into the
    trace of each of its callers. Spans whose caller was not sampled are dropped. Spans of traces without such a request
    id pass unchanged after HOLD_S.
    """

    def __init__(self) -> None:
        self._callers: OrderedDict[str, tuple[Caller, ...]] = OrderedDict()
        self._held: list[tuple[float, dict[str, Any], dict[str, Any], Span]] = []

    def link(self, export: dict[str, Any], now: float) -> dict[str, Any]:
        """Returns the export request to forward: what of `export` and of the held spans can be decided now."""
        arrived = [(now, resource, scope, span) for resource, scope, span in iterate_spans(export)]
        for _, _, _, span in arrived:
            self._learn(span)
        return self._release(self._held + arrived, lambda since: now - since >= HOLD_S)

    def flush(self) -> dict[str, Any]:
        """Returns an export request with everything that is still held."""
        return self._release(self._held, lambda since: True)

    def _learn(self, span: Span) -> None:
        for attribute in span.get("attributes", ()):
            if attribute["key"] == REQUEST_ID:
                callers = parse_request_id(attribute["value"].get("stringValue", ""))
                if callers:
                    self._callers[span["traceId"]] = callers
        while len(self._callers) > REMEMBERED_TRACES:
            self._callers.popitem(last=False)

    def _release(self, spans: list[tuple[float, Any, Any, Span]], expired: Any) -> dict[str, Any]:
        self._held = []
        batches: list[dict[str, Any]] = []
        for since, resource, scope, span in spans:
            callers = self._callers.get(span["traceId"])
            if callers is None and not expired(since):
                self._held.append((since, resource, scope, span))
                continue
            linked = [span] if callers is None else [join_trace(span, caller) for caller in callers if caller.sampled]
            if not linked:
                continue
            if not batches or batches[-1]["resource"] != resource or batches[-1]["scopeSpans"][0]["scope"] != scope:
                batches.append({"resource": resource, "scopeSpans": [{"scope": scope, "spans": []}]})
            batches[-1]["scopeSpans"][0]["spans"].extend(linked)
        return {"resourceSpans": batches}


def join_trace(span: Span, caller: Caller) -> Span:
    """Returns the span as part of the caller's trace; a root becomes the child of the caller's span.

    Of a request id that names a whole batch only the caller's part is left.
    """
    parent = span.get("parentSpanId", "")
    is_root = not parent.strip("0")  # Exporters write no parent, an empty one, or zeros.
    own_id = {"key": REQUEST_ID, "value": {"stringValue": f"{caller.trace_id}-{caller.span_id}"}}
    attributes = [own_id if one["key"] == REQUEST_ID else one for one in span.get("attributes", ())]
    place = {"traceId": caller.trace_id, "parentSpanId": caller.span_id if is_root else parent}
    return {**span, "attributes": attributes, **place}


def iterate_spans(export: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], Span]]:
    """Yields (resource, scope, span) for every span of an OTLP/JSON export request."""
    for resource_spans in export.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                yield resource_spans.get("resource", {}), scope_spans.get("scope", {}), span


@contextlib.contextmanager
def linked_traces(settings: TritonSettings) -> Iterator[TritonSettings]:
    """Yields settings whose Triton exports through a relay, which runs in this process until the block is left.

    Leave it after Triton has ended. Settings without a trace_url are yielded as they are.
    """
    if settings.trace_url is None:
        yield settings
        return
    relay = SpanRelay(settings.trace_url)
    try:
        yield settings.model_copy(update={"trace_url": relay.url})
    finally:
        relay.close()


class SpanRelay:
    """An HTTP endpoint that links spans and forwards them to `target`; on a free local port unless told otherwise.

    A collector that does not answer costs spans, never requests; the log says so once. `close` forwards what is held.
    """

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens at once. Raises OSError when it cannot."""
        self._target = target
        self._linker = SpanLinker()
        self._lock = threading.Lock()
        self._failed = False
        # A proxy from the environment must never see traces.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                self._answer(200 if relay.receive(body) else 400)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="span-relay", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where a Triton on this machine is to export its spans to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def receive(self, body: bytes) -> bool:
        """Links and forwards one OTLP/JSON export request; returns False if it is none."""
        try:
            export = json.loads(body)
            with self._lock:
                linked = self._linker.link(export, time.monotonic())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("Triton exported spans that cannot be read (%s)", type(error).__name__)
            return False
        self._forward(linked)
        return True

    def close(self) -> None:
        """Stops listening and forwards what is still held; call it after Triton has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._forward(self._linker.flush())

    def _forward(self, export: dict[str, Any]) -> None:
        if not export["resourceSpans"]:
            return
        request = urllib.request.Request(
            self._target, json.dumps(export).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with self._opener.open(request, timeout=FORWARD_TIMEOUT_S):
                self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("spans of Triton are lost: %s does not take them (%s)", self._target, error)
            self._failed = True


def main() -> None:
    """Runs a relay by itself, for a Triton that `triptych serve triton` does not start (NVIDIA's container, say)."""
    parser = argparse.ArgumentParser(prog="python -m triptych.triton.relay", description=main.__doc__)
    parser.add_argument("target", help="the collector's OTLP/HTTP traces URL, e.g. http://jaeger:4318/v1/traces")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=4318, help="port to listen on (default: %(default)s)")
    arguments = parser.parse_args()
    setup_logging("triton-relay")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stopping.set())
    relay = SpanRelay(arguments.target, arguments.host, arguments.port)
    log.info("relaying spans from port %d to %s", arguments.port, arguments.target)
    stopping.wait()
    relay.close()


if __name__ == "__main__":
    main()
