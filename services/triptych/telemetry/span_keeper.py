"""Keeps the spans of a stack on this machine, in a process of its own, for `triptych trace`.

A process of its own, because gRPC's threads complain about every child that is started beside them, and so that the
process that watches the services only watches.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from triptych.telemetry.sampling import TRACES_PER_S
from triptych.telemetry.span_log import SpanLog
from triptych.telemetry.span_store import SpanReceiver

MAX_TRACES_PER_S = 10
"""Bounds what keeping spans costs a busy service; a person's requests are all kept."""

EXPORT_DELAY_MS = 1000
"""How long services gather spans before they send them."""

STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def kept_spans(wanted: bool = True) -> Iterator[bool]:
    """Keeps the spans of all services that are started in the block, unless the environment speaks of traces already.

    Sets the variables that make them export. Yields whether spans are kept: they are not when traces are not `wanted`,
    when an OTEL_* variable or TRIPTYCH_TRITON_TRACE_URL is set, or when the store cannot be opened (stderr says why).
    Leave the block after the services have ended.
    """
    if not wanted or speaks_of_traces(os.environ):
        yield False
        return
    # A session of its own: Ctrl-C is for the services first. When this process dies, the pipe ends, and so does it.
    keeper = subprocess.Popen(
        [sys.executable, "-m", "triptych.telemetry.span_keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    variables: dict[str, str] = json.loads(keeper.stdout.readline() or "{}")
    os.environ.update(variables)
    try:
        yield bool(variables)
    finally:
        for name in variables:
            os.environ.pop(name, None)
        keeper.stdin.close()
        keeper.stdout.close()
        try:
            keeper.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()


def speaks_of_traces(environment: Mapping[str, str]) -> bool:
    """Tells whether the operator has decided about traces: then nothing is kept here."""
    return "TRIPTYCH_TRITON_TRACE_URL" in environment or any(name.startswith("OTEL_") for name in environment)


def main() -> None:
    """Prints the variables that make services export here, then keeps spans until standard input ends."""
    try:
        spans = SpanLog()
    except OSError as error:
        print(f"no traces are kept: {error}", file=sys.stderr)
        return
    with spans, SpanReceiver(spans) as receiver:
        variables = {**receiver.environment(EXPORT_DELAY_MS), TRACES_PER_S: str(MAX_TRACES_PER_S)}
        print(json.dumps(variables), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
