"""A trace as a waterfall: for the terminal, and as plain rows."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from triptych.telemetry.span_store import Span
from triptych.telemetry.span_tree import walk

WIDTH = 100
MIN_BAR_WIDTH = 20
MAX_BAR_WIDTH = 60

_NUMBERS_WIDTH = 28
"""What the columns of numbers and the space between columns take."""

_COLOURS = {"gateway": "blue", "router": "cyan", "triton": "green", "worker": "magenta"}
_TOLD = (
    ("triptych.visual_tokens", "visual"),
    ("triptych.cached_tokens", "cached"),
    ("triptych.tokens", "tokens"),
    ("triptych.output_tokens", "tokens"),
    ("gen_ai.usage.output_tokens", "generated"),
)
"""Attributes that are shown beside a bar, and how they are called there."""


def waterfall_rows(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns a plain row per span, parents before children; times in milliseconds since the first span began."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    return [
        {
            "name": span.name,
            "service": span.service,
            "depth": depth,
            "start_ms": (span.start_ns - origin_ns) / 1e6,
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "attributes": span.attributes,
        }
        for depth, span in walk(spans)
    ]


def waterfall_of(spans: Sequence[Span], width: int = WIDTH) -> Table:
    """Returns a drawing of the trace, `width` columns wide: a bar per span, over the time of the whole trace."""
    rows = waterfall_rows(spans)
    total_ms = max((row["start_ms"] + row["duration_ms"] for row in rows), default=0.0)
    names = [Text("  " * row["depth"] + row["name"], style=_colour_of(row)) for row in rows]
    told = [_told(row["attributes"]) for row in rows]
    taken = sum(max((len(text) for text in column), default=0) for column in (names, told)) + _NUMBERS_WIDTH
    bar_width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, width - taken))
    table = Table("span", box=None, padding=(0, 1), header_style="dim")
    table.add_column(f"0 to {total_ms:.1f} ms", width=bar_width, no_wrap=True)
    table.add_column("start ms", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("")
    for row, name, words in zip(rows, names, told, strict=True):
        bar = Text(bar_of(row["start_ms"], row["duration_ms"], total_ms, bar_width), style=_colour_of(row))
        table.add_row(name, bar, f"{row['start_ms']:.1f}", f"{row['duration_ms']:.1f}", words)
    return table


def bar_of(start_ms: float, duration_ms: float, total_ms: float, width: int) -> str:
    """Returns a bar of at least one cell, at its place in `width` cells."""
    if total_ms <= 0:
        return "█"
    first = min(width - 1, int(start_ms / total_ms * width))
    last = max(first + 1, min(width, round((start_ms + duration_ms) / total_ms * width)))
    return " " * first + "█" * (last - first)


def _colour_of(row: dict[str, Any]) -> str:
    return _COLOURS.get(row["service"], "white")


def _told(attributes: dict[str, str]) -> Text:
    told = ", ".join(f"{attributes[key]} {word}" for key, word in _TOLD if attributes.get(key, "0") != "0")
    error = attributes.get("error.type")
    return Text.assemble((told, "dim"), (f" {error}" if error else "", "bold red"))
