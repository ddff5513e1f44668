"""How spans begin, and how they record failure without payload."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from triptych.errors import TriptychError
from triptych.telemetry.tracing import tracer

Attributes = Mapping[str, str | int | float | bool]


@contextmanager
def open_span(
    name: str, parent: Context, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None
) -> Iterator[tuple[Span, Context]]:
    """Yields a new span and the context in which it is current; a failure inside marks it.

    The context is passed on by hand, never attached: parts of a request run inside an async generator, whose steps
    need not share one contextvars context.
    """
    span = tracer.start_span(name, parent, kind, attributes, record_exception=False, set_status_on_exception=False)
    try:
        yield span, trace.set_span_in_context(span, parent)
    except BaseException as error:
        mark_failed(span, error)
        raise
    finally:
        span.end()


def mark_failed(span: Span, error: BaseException) -> None:
    """Records that a span failed and why: by the stable reason or the exception's type, never by its text."""
    if isinstance(error, TriptychError):
        reason = error.reason
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        reason = "CANCELLED"
    else:
        reason = type(error).__name__
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))
