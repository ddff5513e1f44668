"""Context travels as W3C metadata; without the standard variables nothing is installed."""

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from triptych.telemetry.tracing import extract, inject, setup_tracing, trace_id_of, tracing_enabled


def test_tracing_is_off_unless_an_endpoint_is_named() -> None:
    assert not tracing_enabled({})
    assert not tracing_enabled({"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
    assert not tracing_enabled({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"})
    assert tracing_enabled({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert setup_tracing("test") is None


def test_a_context_survives_metadata() -> None:
    span = TracerProvider().get_tracer("test").start_span("parent")
    metadata = inject(trace.set_span_in_context(span))
    got = trace.get_current_span(extract(metadata)).get_span_context()
    assert got.trace_id == span.get_span_context().trace_id
    assert got.span_id == span.get_span_context().span_id
    assert trace_id_of(span) == format(got.trace_id, "032x")


def test_nothing_is_sent_when_nothing_is_traced() -> None:
    assert inject() == ()
    assert trace_id_of(trace.INVALID_SPAN) == ""
    assert not trace.get_current_span(extract(None)).get_span_context().is_valid
