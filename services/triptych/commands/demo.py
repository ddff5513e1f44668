"""`triptych demo`: the whole stack for one question, with its trace."""

import asyncio
import json
import os
import time
from dataclasses import replace

from rich.console import Console

from triptych import client
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.stack import StackSettings, running_stack
from triptych.telemetry.span_store import Span, SpanReceiver
from triptych.telemetry.span_tree import rows_of, tree_of

SERVICES = {"router", "triton", "worker"}
STAGES = ("intake", "preprocess", "encode", "queue", "prefill", "decode")
SPANS_TIMEOUT_S = 15.0


async def run(as_json: bool) -> int:
    """Prints answer, stage timings and span tree; returns 0 if the answer is right and no stage or service is missing.

    With `as_json`, the last line is one JSON object with `answer`, `expected`, `ttft_s`, `stages` and `trace`.
    """
    console = Console(stderr=as_json)
    logs: list[str] = []
    settings = StackSettings.from_environment().without_gateway().on_free_ports()

    def on_ready(name: str, seconds: float) -> None:
        console.print(f"  {name} is ready after {seconds:.1f} s", highlight=False)

    with SpanReceiver() as receiver:
        os.environ.update(receiver.environment())
        # The settings were read before the receiver's ports were known.
        triton = settings.triton.model_copy(update={"trace_url": receiver.http_traces_url})
        settings = replace(settings, triton=triton)
        console.print("starting Triton, worker and router on free ports", highlight=False)
        async with running_stack(settings, lambda name, line: logs.append(f"{name} | {line}"), on_ready):
            console.print(f"  {PICTURE.name}: {QUESTION}", highlight=False)
            async with client.AsyncClient(settings.router_address) as service:
                answer = await service.ask(PICTURE, QUESTION, options=client.Options(timeout_s=60))
            spans = await _collect(receiver, answer.started.trace_id)
    stages = {name: answer.stages[name] for name in STAGES if name in answer.stages}
    problems = _problems(answer, stages, spans)
    if as_json:
        result = {
            "answer": answer.text,
            "expected": ANSWER,
            "ttft_s": answer.stages.get("time_to_first_token"),
            "stages": stages,
            "trace": rows_of(spans),
        }
        print(json.dumps(result))
    else:
        console.print(f"  [bold green]{answer.text}[/]\n", highlight=False)
        for name, seconds in answer.stages.items():
            console.print(f"  {name:>20} {seconds * 1000:8.1f} ms", highlight=False)
        console.print()
        console.print(tree_of(spans))
    for problem in problems:
        Console(stderr=True).print(f"[bold red]demo failed:[/] {problem}", highlight=False)
    if problems:
        Console(stderr=True).print("\n".join(logs[-40:]), highlight=False, markup=False)
    return 1 if problems else 0


async def _collect(receiver: SpanReceiver, trace_id: str) -> list[Span]:
    """Waits until every service's spans have arrived and no more come; Triton exports every few seconds."""
    deadline = time.monotonic() + SPANS_TIMEOUT_S
    spans: list[Span] = []
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        newer = receiver.store.trace(trace_id)
        if len(newer) == len(spans) and {span.service for span in newer} >= SERVICES:
            return newer
        spans = newer
    return spans


def _problems(answer: client.Answer, stages: dict[str, float], spans: list[Span]) -> list[str]:
    problems = []
    if answer.text.strip() != ANSWER:
        problems.append(f"the answer is {answer.text!r}, expected {ANSWER!r}")
    problems += [f"stage {name} has no duration" for name in STAGES if name not in stages]
    missing = SERVICES - {span.service for span in spans}
    problems += [f"the trace has no span of {name}" for name in sorted(missing)]
    return problems
