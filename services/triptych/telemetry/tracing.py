"""OpenTelemetry set-up and W3C context over gRPC metadata.

Without OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) no SDK is installed: spans are no-ops, nothing is exported.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from triptych.telemetry.sampling import sampler_from

tracer = trace.get_tracer("triptych")


def tracing_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether the standard variables name a place to export traces to."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def setup_tracing(service_name: str) -> TracerProvider | None:
    """Installs a provider that exports over OTLP gRPC, if the environment asks for it; call once per process.

    Returns the provider, whose `shutdown()` flushes what is left, or None when tracing is off. OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER and the OTEL_BSP_* variables are honoured by the SDK; TRIPTYCH_TRACES_PER_S by `sampling`.
    """
    if not tracing_enabled():
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    provider = TracerProvider(sampler_from(os.environ), resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def inject(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """Returns gRPC metadata that carries `context` (default: the current one); empty when nothing is traced."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return tuple(carrier.items())


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """Returns the context that a caller's metadata carries, or an empty one."""
    return propagate.extract({key: value for key, value in metadata or () if isinstance(value, str)})


def trace_id_of(span: trace.Span) -> str:
    """Returns a span's trace id as 32 hex digits, or an empty string when it is not recorded."""
    context = span.get_span_context()
    return format(context.trace_id, "032x") if context.is_valid and context.trace_flags.sampled else ""


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent: Context,
    attributes: Mapping[str, str | int | float | bool | Sequence[str]] | None = None,
) -> None:
    """Records a span that has already happened. Times are nanoseconds since the epoch."""
    span = tracer.start_span(name, context=parent, start_time=start_ns, attributes=dict(attributes or {}))
    span.end(end_time=end_ns)
