"""The report as tables for people: one per scenario, a figure per row, a server per column."""

from rich.table import Table

from triptych.bench.report import Report, Result, Summary
from triptych.bench.statistics import Spread

ROWS = (
    ("TTFT p50, ms", "ttft_p50_s", 1e3),
    ("TTFT p99, ms", "ttft_p99_s", 1e3),
    ("TPOT p50, ms", "tpot_p50_s", 1e3),
    ("TPOT p99, ms", "tpot_p99_s", 1e3),
    ("ITL p99, ms", "itl_p99_s", 1e3),
    ("latency p50, ms", "latency_p50_s", 1e3),
    ("latency p99, ms", "latency_p99_s", 1e3),
    ("output tokens/s", "output_tokens_per_s", 1),
    ("requests/s", "requests_per_s", 1),
)


def tables_of(report: Report) -> list[Table]:
    """Returns a table per scenario; figures are medians over the rounds, with the smallest and the largest round."""
    scenarios = dict.fromkeys(result.scenario for result in report.results)
    return [_table([result for result in report.results if result.scenario == name]) for name in scenarios]


def _table(results: list[Result]) -> Table:
    table = Table(
        f"median (range) of {len(results[0].rounds)} rounds",
        title=f"{results[0].scenario}, {results[0].pacing}",
        title_justify="left",
    )
    for result in results:
        table.add_column(result.server, justify="right", overflow="fold")
    _add_rows(table, [result.summary for result in results])
    if any(result.goodput for result in results):
        rates = [f"{result.goodput.requests_per_s:.3g}" if result.goodput else "-" for result in results]
        table.add_row("goodput, requests/s", *rates, style="bold")
    for label in sorted({label for result in results for label in result.by_label}):
        table.add_section()
        table.add_row(f"only {label}", style="bold")
        _add_rows(table, [result.by_label.get(label) for result in results])
    return table


def _add_rows(table: Table, summaries: list[Summary | None]) -> None:
    for heading, name, scale in ROWS:
        table.add_row(heading, *(_figure(getattr(summary, name, None), scale) for summary in summaries))
    errors = [summary.errors if summary else 0 for summary in summaries]
    table.add_row("errors", *(f"[red]{count}[/]" if count else "0" for count in errors))


def _figure(value: Spread | None, scale: float) -> str:
    if value is None:
        return "-"
    median, low, high = (_number(number * scale) for number in (value.median, value.low, value.high))
    return f"{median} ({low}-{high})" if low != high else median


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
