"""`triptych trace`: where one request's time went, from the spans that `triptych up` keeps on this machine."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from triptych.telemetry.span_log import SpanLog
    from triptych.telemetry.span_store import Span

WAIT_S = 3.0
"""Services send their spans about a second after they ended, Triton within two."""

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
    console.print(waterfall_of(spans, console.width))


def find(log: "SpanLog", name: str, wait_s: float = WAIT_S) -> "list[Span]":
    """Returns a request's spans, waiting up to `wait_s` for those that are still under way.

    An empty name is the newest request. Raises InvalidRequest (TRACE_UNKNOWN) when there is none.
    """
    from triptych.errors import InvalidRequest
    from triptych.telemetry.span_keeper import MAX_TRACES_PER_S

    deadline_s = time.monotonic() + wait_s
    while not (is_complete(spans := _look(log, name)) or _is_old(spans)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if spans:
        return spans
    what = f"no request {name!r} is known here" if name else "no request is known here"
    raise InvalidRequest(
        f"{what}: `triptych up` keeps the newest, at most {MAX_TRACES_PER_S} a second, unless --no-traces or an OTEL_* "
        "variable is set",
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


def is_complete(spans: "list[Span]") -> bool:
    """Tells whether a trace has its root and something of every service that worked for it, and nothing is cut off."""
    from triptych.telemetry.span_tree import roots_of

    services = {span.service for span in spans}
    needed = {"router", "worker"} | ({"triton"} if any(span.name == "router.encode" for span in spans) else set())
    return services >= needed and [root.parent_id for root in roots_of(spans)] == [""]


def _is_old(spans: "list[Span]") -> bool:
    """Tells whether nothing more is to be expected."""
    return bool(spans) and time.time_ns() - max(span.end_ns for span in spans) > WAIT_S * 1e9
