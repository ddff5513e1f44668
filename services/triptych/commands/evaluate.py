"""`triptych evaluate`: exact answers of the demo model on held-out scenes, through a running stack."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from triptych import client
from triptych.bench.markdown import table_lines
from triptych.commands.held_out import PICTURE_SIDE, converse, is_exact, service_at
from triptych.demo.scenes import Example, held_out

CONCURRENCY = 8
"""Few enough that load does not lower the resolution."""
DETAILS: tuple[client.Detail, ...] = ("high", "medium", "low", "thumbnail")

Scores = dict[str, tuple[int, int]]
"""Per kind of question: exact answers, questions."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What was measured: per image detail, the side that the encoder saw (pixels) and the scores."""

    scenes: int
    sides: dict[str, int]
    scores: dict[str, Scores]


def run(count: int, address: str | None, report: Path | None, as_json: bool) -> None:
    """Prints a table of exact answers by question kind and image detail; writes it to `report` as Markdown.

    Each turn of a dialogue counts as a question; later turns see the model's own earlier answers.
    """
    accuracy = asyncio.run(measure(count, address))
    if report is not None:
        report.write_text(_markdown(accuracy), encoding="utf-8")
    if as_json:
        print(json.dumps({"scenes": count, "sides": accuracy.sides, "exact": accuracy.scores}))
    else:
        Console().print(_table(accuracy))


async def measure(count: int, address: str | None) -> Accuracy:
    """Asks about `count` held-out scenes at each detail, at `address` or through a stack of its own."""
    console = Console(stderr=True)
    async with service_at(address, console) as service:
        examples = held_out(count, size=PICTURE_SIDE)
        accuracy = Accuracy(count, {}, {})
        with Progress(console=console) as progress:
            for detail in DETAILS:
                advance = partial(progress.advance, progress.add_task(f"{detail} detail", total=count))
                accuracy.scores[detail], accuracy.sides[detail] = await _score(service, examples, detail, advance)
    return accuracy


async def _score(
    service: client.AsyncClient, examples: list[Example], detail: client.Detail, on_done: Callable[[], None]
) -> tuple[Scores, int]:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    sides: set[int] = set()
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(example: Example) -> None:
        async with gate:
            answers = await converse(service, example, client.Options(), detail)
        for answer, turn in zip(answers, example.dialogue.turns, strict=True):
            sides.update(image.encoded_side for image in answer.started.images)
            for kind in {example.dialogue.kind, "all"}:
                asked[kind] += 1
                right[kind] += is_exact(answer, turn)
        on_done()

    async with asyncio.TaskGroup() as group:
        for example in examples:
            group.create_task(one(example))
    return {kind: (right[kind], asked[kind]) for kind in sorted(asked)}, max(sides)


def _kinds(accuracy: Accuracy) -> list[str]:
    return [*sorted({kind for scores in accuracy.scores.values() for kind in scores} - {"all"}), "all"]


def _cells(accuracy: Accuracy, kind: str) -> list[str]:
    pairs = [scores.get(kind, (0, 0)) for scores in accuracy.scores.values()]
    return [f"{100 * right / asked:.1f} % ({right}/{asked})" if asked else "-" for right, asked in pairs]


def _headings(accuracy: Accuracy) -> list[str]:
    return ["question", *(f"{detail} detail ({accuracy.sides[detail]} px)" for detail in accuracy.scores)]


def _table(accuracy: Accuracy) -> Table:
    table = Table(*_headings(accuracy))
    for kind in _kinds(accuracy):
        table.add_row(kind, *_cells(accuracy, kind))
    return table


def _markdown(accuracy: Accuracy) -> str:
    rows = table_lines(_headings(accuracy), ([kind, *_cells(accuracy, kind)] for kind in _kinds(accuracy)))
    return "\n".join(
        [
            "# Accuracy of the demo model",
            "",
            f"Exact answers on {accuracy.scenes} held-out scenes (never used in training), greedy, asked through the",
            f"running stack: PNG of {PICTURE_SIDE} px, router, Triton, worker. Each turn of a two-turn dialogue counts",
            "as a question, and the second turn sees the model's own first answer. Written by `make report`.",
            "",
            rows,
            "",
        ]
    )
