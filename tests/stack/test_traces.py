"""One trace through every stage of every request."""

import asyncio
import time

import pytest

from tests.stack.conftest import Up, noise_png
from triptych.client import AsyncClient, Options
from triptych.telemetry.span_store import Span, SpanReceiver
from triptych.telemetry.span_tree import roots_of

pytestmark = pytest.mark.integration

EXPECTED_SPANS = {
    ("router.generate", "router"),
    ("router.intake", "router"),
    ("router.preprocess", "router"),
    ("router.encode", "router"),
    ("router.worker", "router"),
    ("worker.generate", "worker"),
    ("worker.queue", "worker"),
    ("worker.prefill_chunk", "worker"),
    ("worker.decode", "worker"),
}


async def complete_traces(receiver: SpanReceiver, trace_ids: list[str]) -> dict[str, list[Span]]:
    """Waits for the exporters (Triton's sends every few seconds) and returns what has come for each trace."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        traces = {trace_id: receiver.store.trace(trace_id) for trace_id in trace_ids}
        if all(
            {span.service for span in spans} >= {"router", "triton", "worker"}
            and {(span.name, span.service) for span in spans} >= EXPECTED_SPANS
            for spans in traces.values()
        ):
            break
        await asyncio.sleep(0.5)
    return traces


async def test_100_of_100_concurrent_requests_are_one_linked_trace_each(served: Up, receiver: SpanReceiver) -> None:
    async with AsyncClient(served.router) as client:

        async def one(number: int) -> str:
            options = Options(max_tokens=3, ignore_eos=True)
            answer = await client.ask(noise_png(number, 64), "what is it?", options=options)
            return answer.started.trace_id

        trace_ids = await asyncio.gather(*(one(9000 + number) for number in range(100)))
    assert len(set(trace_ids)) == 100
    traces = await complete_traces(receiver, trace_ids)
    for spans in traces.values():
        assert {(span.name, span.service) for span in spans} >= EXPECTED_SPANS
        assert [root.name for root in roots_of(spans)] == ["router.generate"]
        encode = next(span for span in spans if span.name == "router.encode")
        triton = [span for span in spans if span.service == "triton"]
        assert encode.span_id in {span.parent_id for span in triton}
        worker = next(span for span in spans if span.name == "worker.generate")
        assert worker.parent_id == next(span.span_id for span in spans if span.name == "router.worker")
        assert all(span.start_ns <= span.end_ns for span in spans)


async def test_no_prompt_text_is_in_any_span(served: Up, receiver: SpanReceiver) -> None:
    secret = "xylophone"
    async with AsyncClient(served.router) as client:
        answer = await client.ask(noise_png(9500, 64), f"is there a {secret}?", options=Options(max_tokens=3))
    traces = await complete_traces(receiver, [answer.started.trace_id])
    spans = traces[answer.started.trace_id]
    assert spans
    assert secret not in str(spans)
    assert secret not in "\n".join(served.lines)
