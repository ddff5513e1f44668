"""A request's stages as spans and as durations."""

from google.protobuf import duration_pb2
from opentelemetry import trace

from triptych.telemetry.tracing import record_span
from triptych.v1 import generation_pb2
from triptych.worker.drafts import DraftedGeneration
from triptych.worker.engine.events import Usage
from triptych.worker.engine.timeline import Timeline


def record_stages(span: trace.Span, timeline: Timeline, usage: Usage) -> None:
    """Records queue, prefill chunks and decode below a request's span; does nothing when it is not recorded."""
    if not span.is_recording():
        return
    span.set_attribute("gen_ai.usage.input_tokens", usage.text_tokens + usage.visual_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
    parent = trace.set_span_in_context(span)
    if timeline.chunks:
        record_span("worker.queue", timeline.arrival_ns, timeline.chunks[0].start_ns, parent)
    for chunk in timeline.chunks:
        attributes = {
            "triptych.tokens": chunk.tokens,
            "triptych.visual_tokens": chunk.visual_tokens,
            "triptych.cached_tokens": chunk.cached_tokens,
        }
        record_span("worker.prefill_chunk", chunk.start_ns, chunk.end_ns, parent, attributes)
    if timeline.first_token_ns is not None and timeline.last_token_ns is not None:
        attributes = {"triptych.output_tokens": usage.output_tokens}
        record_span("worker.decode", timeline.first_token_ns, timeline.last_token_ns, parent, attributes)


def record_draft(span: trace.Span, drafted: DraftedGeneration) -> None:
    """Records the time that a request was computed on draft features and waited for the verdict on them."""
    if span.is_recording() and drafted.settled_ns is not None:
        attributes = {"triptych.draft.kept": drafted.kept, "triptych.draft.tokens": drafted.drafted_tokens}
        parent = trace.set_span_in_context(span)
        record_span("worker.draft", drafted.request.arrival_ns, drafted.settled_ns, parent, attributes)


def stage_durations(timeline: Timeline, now_ns: int) -> generation_pb2.StageDurations:
    """Returns the worker's stages of a request that has produced at least one token."""
    durations = generation_pb2.StageDurations(total=_between(timeline.arrival_ns, now_ns))
    if timeline.chunks and timeline.first_token_ns is not None and timeline.last_token_ns is not None:
        first_chunk_ns = timeline.chunks[0].start_ns
        durations.queue.CopyFrom(_between(timeline.arrival_ns, first_chunk_ns))
        durations.prefill.CopyFrom(_between(first_chunk_ns, timeline.first_token_ns))
        durations.decode.CopyFrom(_between(timeline.first_token_ns, timeline.last_token_ns))
        durations.time_to_first_token.CopyFrom(_between(timeline.arrival_ns, timeline.first_token_ns))
    return durations


def _between(start_ns: int, end_ns: int) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, end_ns - start_ns))
    return duration
