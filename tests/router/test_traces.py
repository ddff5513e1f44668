from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.router.conftest import Rig, until
from tests.router.fakes import ask, png
from triptych.telemetry import spans, tracing
from triptych.v1 import inference_pb2
from triptych.vision.reduction_spec import parse_reduction, to_message

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(tracing, "tracer", tracer)
    monkeypatch.setattr(spans, "tracer", tracer)
    yield memory
    provider.shutdown()


async def finished(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    """Returns the spans of the one request that ran, by name."""
    await until(lambda: any(span.name == "router.generate" for span in exporter.get_finished_spans()))
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    return by_name


async def test_a_request_is_one_span_tree_under_its_callers(rig: Rig, exporter: InMemorySpanExporter) -> None:
    answer = await rig.answer(ask(png((1, 0, 0)), png((2, 0, 0)), "?"), metadata=(("traceparent", CALLER),))
    tree = await finished(exporter)
    counts = {name: len(found) for name, found in tree.items()}
    assert counts == {
        "router.generate": 1,
        "router.intake": 1,
        "router.preprocess": 2,
        "router.probe": 1,
        "router.encode": 2,
        "router.worker": 1,
    }
    (root,) = tree["router.generate"]
    assert root.parent is not None and format(root.parent.span_id, "016x") == "b7ad6b7169203331"
    assert answer.started.trace_id == "0af7651916cd43dd8448eb211c80319c"
    for span in exporter.get_finished_spans():
        assert span is root or (span.parent is not None and span.parent.span_id == root.context.span_id)
    attributes = root.attributes or {}
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "demo"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (133, 3)
    assert attributes["gen_ai.response.finish_reasons"] == ("end",)
    encode = tree["router.encode"][0].attributes or {}
    assert encode["triptych.feature_source"] == "encoder"
    assert (encode["triptych.pixels"], encode["triptych.visual_tokens"]) == (112 * 112, 64)
    worker_span = tree["router.worker"][0].context
    assert f"-{worker_span.span_id:016x}-" in str(rig.worker.metadata[0]["traceparent"])
    encoder_contexts = {trace.get_current_span(context).get_span_context().span_id for context in rig.encoder.traces}
    assert encoder_contexts == {span.context.span_id for span in tree["router.encode"]}


async def test_a_cached_image_has_no_encode_span(rig: Rig, exporter: InMemorySpanExporter) -> None:
    await rig.answer(ask(png(), "?"))
    await finished(exporter)
    exporter.clear()
    await rig.answer(ask(png(), "?"))
    assert "router.encode" not in await finished(exporter)


async def test_a_reduction_is_a_span_that_says_how_many_tokens_are_left(
    rig: Rig, exporter: InMemorySpanExporter
) -> None:
    await rig.answer(ask(png(), "?", reduction=to_message(parse_reduction("merge:8"))))
    attributes = (await finished(exporter))["router.reduce"][0].attributes or {}
    assert attributes["triptych.reduction"] == "merge:8"
    assert (attributes["triptych.encoder_tokens"], attributes["triptych.visual_tokens"]) == (64, 8)


async def test_a_draft_and_its_verdict_are_spans_and_say_how_alike_both_encoders_were(
    rig: Rig, exporter: InMemorySpanExporter
) -> None:
    rig.encoder.behave = lambda: until(lambda: len(rig.worker.requests) > 0)
    await rig.answer(ask(png(), "?", draft=inference_pb2.DraftOptions(mode=inference_pb2.DRAFT_MODE_ON)))
    tree = await finished(exporter)
    assert {name: len(tree[name]) for name in ("router.draft", "router.encode", "router.verify")} == {
        "router.draft": 1,
        "router.encode": 1,
        "router.verify": 1,
    }
    attributes = tree["router.verify"][0].attributes or {}
    assert attributes["triptych.draft.outcome"] == "kept"
    assert attributes["triptych.draft.similarity"] == pytest.approx(1)
    assert attributes["triptych.draft.threshold"] == 0.95


async def test_errors_are_recorded_by_reason_and_payload_is_nowhere(rig: Rig, exporter: InMemorySpanExporter) -> None:
    request = ask("a xylophone", png()[:-9])
    request.degradation_policy = inference_pb2.DEGRADATION_POLICY_FORBID
    await rig.failure(request)
    tree = await finished(exporter)
    for name in ("router.intake", "router.preprocess", "router.generate"):
        attributes = tree[name][-1].attributes or {}
        if name != "router.intake":
            assert attributes["error.type"] == "IMAGE_CORRUPT"
    assert "xylophone" not in "".join(span.to_json() for span in exporter.get_finished_spans())


async def test_without_tracing_there_is_no_trace_id_and_no_metadata(rig: Rig) -> None:
    answer = await rig.answer(ask(png(), "?"))
    assert answer.started.trace_id == ""
    assert "traceparent" not in rig.worker.metadata[0]
