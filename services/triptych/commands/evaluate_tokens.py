"""`triptych evaluate --reduce`: what fewer visual tokens cost and bring, through a running stack.

One question at a time, each picture new to every cache, all ways of answering right after one another: a machine that
gets busy slows them all.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from triptych import client
from triptych.bench.markdown import replace_section, table_lines
from triptych.commands.held_out import PICTURE_SIDE, converse, is_exact, service_at
from triptych.demo.scenes import held_out
from triptych.vision.reduction import reduce_tokens
from triptych.vision.reduction_spec import DEFAULT_TOKENS, Method, Reduction, parse_reduction

LARGE_TOKENS, LARGE_HIDDEN = 576, 4096
"""The shape of an image's features in LLaVA 1.5 7B."""

HEADINGS = ("reduction", "visual tokens", "exact answers", "encode ms", "reduce ms", "prefill ms", "first token ms")

_STAGES = ("encode", "reduce", "prefill", "time_to_first_token")


@dataclass(slots=True)
class Measured:
    """One way of keeping tokens.

    Attributes:
        visual_tokens: Of one picture in the prompt.
        right, asked: Exact answers and questions, all turns of all dialogues.
        seconds: By stage, of every first question.
    """

    visual_tokens: int = 0
    right: int = 0
    asked: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, answers: list[client.Answer], exact: Iterable[bool]) -> None:
        """Counts one dialogue; times are those of its first question, whose picture no cache knows."""
        first = answers[0]
        self.visual_tokens = first.usage.visual_tokens
        for is_right in exact:
            self.right += is_right
            self.asked += 1
        for stage in _STAGES:
            self.seconds[stage].append(first.stages.get(stage, 0.0))

    def median_ms(self, stage: str) -> float:
        """Returns the median of a stage; `encode` without the reduction that its own figure includes."""
        seconds = self.seconds[stage]
        if stage == "encode":
            seconds = [whole - part for whole, part in zip(seconds, self.seconds["reduce"], strict=True)]
        return 1e3 * median(seconds)


def run(count: int, address: str | None, reductions: list[str], report: Path | None, as_json: bool) -> None:
    """Prints tokens, exact answers and times for all tokens and for each reduction; renews them in `report`.

    Raises InvalidRequest (REDUCTION_INVALID), or when the report has no place for the table.
    """
    names = ["none", *(str(parse_reduction(text)) for text in reductions if parse_reduction(text))]
    measured = asyncio.run(_measure(count, address, names))
    large_ms = {method: _cost_at_large_shape_ms(method) for method in ("kmeans", "merge")}
    if report is not None:
        replace_section(report, "reductions", "\n".join(_report_lines(count, measured, large_ms)))
    if as_json:
        print(json.dumps({"scenes": count, "reductions": _plain(measured), "large_shape_ms": large_ms}))
    else:
        table = Table(*HEADINGS, box=SIMPLE)
        for row in _rows(measured):
            table.add_row(*row)
        Console().print(table)
        for line in _verdicts(measured, large_ms):
            Console().print(line, highlight=False)


async def _measure(count: int, address: str | None, names: list[str]) -> dict[str, Measured]:
    console = Console(stderr=True)
    measured = {name: Measured() for name in names}
    async with service_at(address, console) as service:
        for number, example in enumerate(track(held_out(count, size=PICTURE_SIDE), console=console)):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                # A salt of its own: nobody finds the picture in a cache because another way had seen it.
                answers = await converse(service, example, client.Options(reduce=name, cache_salt=name))
                measured[name].add(answers, map(is_exact, answers, example.dialogue.turns))
    return measured


def _cost_at_large_shape_ms(method: Method) -> float:
    features = np.random.default_rng(0).standard_normal((1, LARGE_TOKENS, LARGE_HIDDEN)).astype(np.float32)
    seconds = []
    for _ in range(9):
        started_s = time.perf_counter()
        reduce_tokens(features, Reduction(method, DEFAULT_TOKENS))
        seconds.append(time.perf_counter() - started_s)
    return 1e3 * median(seconds)


def _rows(measured: dict[str, Measured]) -> list[list[str]]:
    return [
        [
            name,
            str(each.visual_tokens),
            f"{100 * each.right / each.asked:.1f} % ({each.right}/{each.asked})",
            *(f"{each.median_ms(stage):.1f}" for stage in _STAGES),
        ]
        for name, each in measured.items()
    ]


def _verdicts(measured: dict[str, Measured], large_ms: dict[str, float]) -> list[str]:
    """Returns, for each reduction, whether it saves more time than it costs."""
    prefill_ms = measured["none"].median_ms("prefill")
    lines = []
    for name, each in measured.items():
        if name != "none":
            cost_ms, saved_ms = each.median_ms("reduce"), prefill_ms - each.median_ms("prefill")
            verdict = "costs more time than it saves" if cost_ms >= saved_ms else "saves more time than it costs"
            lines.append(f"{name} {verdict}: {cost_ms:.1f} ms against {saved_ms:.1f} ms of prefill.")
    for method, cost_ms in large_ms.items():
        lines.append(
            f"{method} from {LARGE_TOKENS} tokens of {LARGE_HIDDEN:,} to {DEFAULT_TOKENS} takes {cost_ms:.0f} ms here."
        )
    return lines


def _report_lines(count: int, measured: dict[str, Measured], large_ms: dict[str, float]) -> list[str]:
    return [
        f"{count} held-out scenes, one question at a time; times are medians over the first question of each dialogue:",
        "",
        table_lines(HEADINGS, _rows(measured)),
        "",
        *(f"- {line}" for line in _verdicts(measured, large_ms)),
    ]


def _plain(measured: dict[str, Measured]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "visual_tokens": each.visual_tokens,
            "right": each.right,
            "asked": each.asked,
            **{f"{stage}_ms": each.median_ms(stage) for stage in _STAGES},
        }
        for name, each in measured.items()
    }
