"""`triptych trace`: where one request's time went, from the spans that `triptych up` keeps on this machine."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from triptych.telemetry.span_log import SpanLog
    from triptych.telemetry.span_store import Span

WAIT_S = 3.0
"""Services send their spans about a second after they ended."""

POLL_S = 0.2

HTTP_PREFIXES = ("chatcmpl-", "cmpl-")
"""What the gateway puts before a request's id in the id of a completion."""


def trace(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST_ID|TRACE_ID]",
            help="of an answer, as `triptych ask --json` or the HTTP API shows it; unset: the newest request",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Draws the waterfall of a request that a `triptych up` on this machine has served."""
    from rich.console import Console

    from triptych.telemetry.span_log import SpanLog
    from triptych.telemetry.waterfall import waterfall_of, waterfall_rows

    with SpanLog() as log:
        spans = find(log, name)
    request_id = next((id_ for span in spans if (id_ := span.attributes.get("triptych.request_id"))), "")
    if as_json:
        row = {"trace_id": spans[0].trace_id, "request_id": request_id, "spans": waterfall_rows(spans)}
        print(json.dumps(row))
        return
    console = Console()
    console.print(f"request [bold]{request_id}[/], trace {spans[0].trace_id}", highlight=False, soft_wrap=True)
    console.print(waterfall_of(spans, bar_width=max(10, min(60, console.width - 60))))


def find(log: "SpanLog", name: str, wait_s: float = WAIT_S) -> "list[Span]":
    """Returns a request's spans, waiting up to `wait_s` for the first to arrive and for no more to come.

    An empty name is the newest request. Raises InvalidRequest (TRACE_UNKNOWN) when there is none.
    """
    from triptych.errors import InvalidRequest

    deadline_s = time.monotonic() + wait_s
    spans: list[Span] = []
    while True:
        newer = _look(log, name)
        if newer and (len(newer) == len(spans) or _is_old(newer)):
            return newer
        spans = newer
        if time.monotonic() >= deadline_s:
            break
        time.sleep(POLL_S)
    if spans:
        return spans
    what = f"no request {name!r} is known here" if name else "no request is known here"
    raise InvalidRequest(
        f"{what}: spans are kept by `triptych up` without --no-traces and without OTEL_* variables, the newest only",
        reason="TRACE_UNKNOWN",
    )


def _look(log: "SpanLog", name: str) -> "list[Span]":
    if not name:
        newest = log.newest()
        return log.trace(newest) if newest else []
    for prefix in HTTP_PREFIXES:
        if name.startswith(prefix):
            return log.trace(name) or log.trace(name.removeprefix(prefix))
    return log.trace(name)


def _is_old(spans: "list[Span]") -> bool:
    return time.time_ns() - max(span.end_ns for span in spans) > WAIT_S * 1e9
