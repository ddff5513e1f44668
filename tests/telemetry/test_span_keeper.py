"""Spans are kept for those who have not decided otherwise."""

import os
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from triptych.telemetry.sampling import sampler_from
from triptych.telemetry.span_keeper import kept_spans
from triptych.telemetry.span_log import SpanLog, default_path
from triptych.telemetry.tracing import tracing_enabled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def clear_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_") or name == "TRIPTYCH_TRITON_TRACE_URL":
            monkeypatch.delenv(name)


def test_services_started_in_the_block_export_here_and_later_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_variables(monkeypatch)
    with kept_spans() as kept:
        assert kept and tracing_enabled()
        exporter = OTLPSpanExporter()
        provider = TracerProvider(sampler_from(os.environ))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        with provider.get_tracer("test").start_as_current_span("router.generate") as span:
            span.set_attribute("triptych.request_id", "r1")
        provider.shutdown()
    assert not tracing_enabled()
    with SpanLog() as log:
        assert [found.name for found in log.trace("r1")] == ["router.generate"]


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "TRIPTYCH_TRITON_TRACE_URL"])
def test_an_operator_who_has_decided_about_traces_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_variables(monkeypatch)
    monkeypatch.setenv(name, "http://127.0.0.1:4317")
    with kept_spans() as kept:
        assert not kept
    assert not default_path().exists()


def test_traces_that_are_not_wanted_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_variables(monkeypatch)
    with kept_spans(wanted=False) as kept:
        assert not kept
    assert not default_path().exists() and not tracing_enabled()


def test_a_store_that_cannot_be_opened_is_said_and_the_services_run_without(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clear_variables(monkeypatch)
    default_path().parent.mkdir()
    default_path().write_bytes(b"something else entirely, and long enough to be read" * 99)
    with kept_spans() as kept:
        assert not kept and not tracing_enabled()
    assert "no traces are kept" in capfd.readouterr().err
