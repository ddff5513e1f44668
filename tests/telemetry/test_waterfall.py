"""The waterfall: every span at its place."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from triptych.telemetry.span_store import Span
from triptych.telemetry.waterfall import bar_of, waterfall_of, waterfall_rows

MS = 1_000_000


def span(name: str, start_ms: int, end_ms: int, parent: str = "", **attributes: str) -> Span:
    values = {key.replace("_", ".", 1): value for key, value in attributes.items()}
    return Span(name, "router", "t", name, parent, start_ms * MS, end_ms * MS, values)


SPANS = [
    span("decode", 60, 100, "generate", triptych_output_tokens="7"),
    span("generate", 0, 100),
    span("encode", 10, 60, "generate", error_type="ENCODE_TIMEOUT"),
]


def test_rows_have_depth_start_and_duration_and_come_parents_first() -> None:
    rows = waterfall_rows(SPANS)
    assert [(row["name"], row["depth"], row["start_ms"], row["duration_ms"]) for row in rows] == [
        ("generate", 0, 0, 100), ("encode", 1, 10, 50), ("decode", 1, 60, 40),
    ]  # fmt: skip


def test_the_drawing_shows_bars_counts_and_failures() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(waterfall_of(SPANS, width=80))
    lines = console.export_text().splitlines()
    assert len(lines) == 4
    assert "█" * 20 in lines[1] and all(len(line) <= 80 for line in lines)
    assert "ENCODE_TIMEOUT" in lines[2] and "7 tokens" in lines[3]
    assert lines[2].index("█") < lines[3].index("█")


@given(
    st.floats(min_value=0, max_value=100), st.floats(min_value=0, max_value=100), st.integers(min_value=1, max_value=80)
)
def test_a_bar_is_never_empty_and_never_too_long(start_ms: float, duration_ms: float, width: int) -> None:
    bar = bar_of(start_ms, duration_ms, start_ms + duration_ms, width)
    assert 1 <= len(bar) <= width
    assert bar.endswith("█")


def test_an_empty_trace_is_drawn_as_nothing() -> None:
    assert waterfall_rows([]) == []
    Console(file=io.StringIO()).print(waterfall_of([]))
