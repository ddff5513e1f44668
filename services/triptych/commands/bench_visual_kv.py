"""`triptych bench visual-kv`: what each visual KV policy saves, costs and loses."""

import asyncio
import json
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.visual_kv import VisualKvPolicy

if TYPE_CHECKING:
    from triptych import client
    from triptych.bench.visual_kv.measure import PolicyFigures
    from triptych.demo.scenes import Example

HEADINGS = (
    "policy",
    "exact answers",
    "KV of a picture",
    "set aside",
    "decode speed",
    "logits, words",
    "logits, noise",
)
SEQUENCES = (1, 8)

Answers = dict[VisualKvPolicy, tuple[int, int]]
"""Exact answers and questions of the demo model."""


def visual_kv(
    model: Annotated[Path | None, typer.Option(help="checkpoint folder; unset: that of `triptych bench model`")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="of weights and cache")] = "bfloat16",
    ratio: Annotated[int, typer.Option(min=2, max=16, help="how many times smaller compressed KV is")] = 4,
    count: Annotated[int, typer.Option(min=1, help="held-out scenes the demo model is asked about")] = 500,
    places: Annotated[int, typer.Option(min=1, help="next tokens whose logits are compared")] = 48,
    report: Annotated[Path | None, typer.Option(help="Markdown file whose table is renewed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Measures every visual KV policy: memory, decode speed and logits in process, answers through a stack."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from triptych.bench.engine.checkpoint import TEXT_MODEL, bench_checkpoint
    from triptych.bench.markdown import replace_section, table_lines
    from triptych.bench.visual_kv.measure import measure

    console = Console(stderr=as_json)
    folder = model or bench_checkpoint(TEXT_MODEL)
    with Console(stderr=True).status("loading") as status:
        figures = measure(folder, dtype, ratio, SEQUENCES, places, status.update)
    answers = asyncio.run(_ask(count, ratio))
    rows = [_cells(one, *answers[one.policy]) for one in figures]
    table = Table(*HEADINGS, box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if report is not None:
        title = f"{folder.name}, {dtype}, ratio {ratio}; exact answers of models/demo on {count} held-out scenes:"
        replace_section(report, "policies", f"{title}\n\n{table_lines(HEADINGS, rows)}")
    if as_json:
        keys: dict[str, object] = {f"{policy.value}_exact": right / asked for policy, (right, asked) in answers.items()}
        keys |= {"machine": platform.processor() or platform.machine(), "model": folder.name, "ratio": ratio}
        print(json.dumps(keys | {"figures": [one.model_dump(mode="json") for one in figures]}))


async def _ask(count: int, ratio: int) -> Answers:
    """Asks a stack of its own about held-out scenes under every policy."""
    import os

    from rich.console import Console
    from rich.progress import track

    from triptych.commands.held_out import PICTURE_SIDE, service_at
    from triptych.demo.scenes import held_out

    os.environ["TRIPTYCH_WORKER_VISUAL_KV_RATIO"] = str(ratio)  # The stack's worker is a child.
    console = Console(stderr=True)
    right: Counter[VisualKvPolicy] = Counter()
    asked: Counter[VisualKvPolicy] = Counter()
    async with service_at(None, console) as service:
        examples = held_out(count, size=PICTURE_SIDE)
        for example in track(examples, "asking", console=console):
            found = await asyncio.gather(*(_converse(service, example, policy) for policy in VisualKvPolicy))
            for policy, exact in zip(VisualKvPolicy, found, strict=True):
                right[policy] += sum(exact)
                asked[policy] += len(exact)
    return {policy: (right[policy], asked[policy]) for policy in VisualKvPolicy}


async def _converse(service: "client.AsyncClient", example: "Example", policy: VisualKvPolicy) -> list[bool]:
    """Returns which answers of a dialogue are exact. Raises TriptychError when one came about in another way."""
    from triptych.client import Options
    from triptych.commands.held_out import converse, is_exact
    from triptych.errors import TriptychError

    answers = await converse(service, example, Options(visual_kv=policy))
    for answer in answers:
        if answer.finished.visual_kv.policy != policy.proto and answer.usage.output_tokens > 1:
            raise TriptychError(f"an answer was to come about under {policy.value} and did not")
    return [is_exact(answer, turn) for answer, turn in zip(answers, example.dialogue.turns, strict=True)]


def _cells(figures: "PolicyFigures", right: int, asked: int) -> tuple[str, ...]:
    left = figures.kv_bytes - figures.saved_bytes
    speeds = ", ".join(
        f"{speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f}) at {count}" for count, speed in figures.speed.items()
    )
    return (
        f"`{figures.policy.value}`",
        f"{100 * right / asked:.1f} % ({right}/{asked})",
        f"{left / 1e6:.2f} MB",
        f"{1e3 * figures.set_aside_s:.1f} ms",
        speeds,
        *(f"{100 * error.relative:.1f} %, {100 * error.same_token:.0f} % alike" for error in figures.errors),
    )
