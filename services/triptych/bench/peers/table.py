"""The comparison for people: a table, in a terminal and in a Markdown file, and a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from triptych.bench.markdown import replace_section, table_lines
from triptych.bench.peers.peer import SHORT
from triptych.bench.peers.results import Results
from triptych.bench.peers.summary import Row, Verdict, judge, summarise
from triptych.bench.peers.trials import Trial
from triptych.bench.statistics import Spread
from triptych.errors import Unavailable

SECTION = "peers"

_MOST_COLUMNS = 3


def tables_of(results: Results, trials: Sequence[Trial]) -> list[Table]:
    """Returns the figures and the verdicts."""
    tables = []
    for title, (headings, rows) in (
        (f"{results.model}, {_rounds(results)} rounds", _figures(results, trials)),
        ("ours against the best peer", _verdicts(results, trials)),
    ):
        table = Table(*headings[:1], title=title, title_justify="left")
        for heading in headings[1:]:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def write_report(results: Results, trials: Sequence[Trial], file: Path, section: str = SECTION) -> Path:
    """Replaces the tables between `<!-- SECTION -->` and `<!-- end -->` in a Markdown file, and draws SECTION.svg
    beside it; returns the picture's path.

    Raises InvalidRequest when the file has no such place, Unavailable without matplotlib.
    """
    picture = write_plot(results, trials, file.with_name(f"{section}.svg"))
    head = (
        f"{results.model}, {results.machine['cores']} cores, {results.machine['processor']}; "
        f"median of {_rounds(results)} rounds (smallest to largest); share of the limit of the same moment:"
    )
    parts = [head, table_lines(*_figures(results, trials)), table_lines(*_verdicts(results, trials))]
    replace_section(file, section, "\n\n".join([*parts, f"![{results.model}: all engines]({picture.name})"]))
    return picture


def write_plot(results: Results, trials: Sequence[Trial], file: Path) -> Path:
    """Draws a bar per engine and trial, and the rounds' range on it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unavailable("no picture without matplotlib: pip install 'triptych[bench]'") from None
    rows = summarise(results, trials)
    entries = [one for one in results.entries if any(row.entry == one.name for row in rows)][::-1]
    columns = min(len(trials), _MOST_COLUMNS)
    lines = -(-len(trials) // columns)
    figure = Figure(figsize=(4 * columns, lines * (1 + 0.32 * len(entries))), layout="constrained")
    places = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axes in places[len(trials) :]:
        axes.set_visible(False)
    for axes, trial in zip(places, trials, strict=False):
        of_trial = {row.entry: row.value for row in rows if row.trial == trial.name}
        for place, entry in enumerate(entries):
            value = of_trial.get(entry.name)
            if value is None:
                continue
            reach = [[value.median - value.low], [value.high - value.median]]
            colour = "tab:orange" if entry.ours else "tab:blue"
            axes.barh(place, value.median, xerr=reach, color=colour, alpha=0.85, ecolor="0.3", capsize=2)
            axes.text(value.high, place, f" {_number(value.median)}", va="center", fontsize=8)
        axes.set_yticks(range(len(entries)), [f"{one.title}, {SHORT[one.dtype]}" for one in entries])
        axes.set_title(trial.title, fontsize=10)
        axes.set_xlabel(trial.unit if trial.better == "higher" else f"{trial.unit}, less is better")
        axes.margins(x=0.15)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, metadata={"Date": None})
    return file


def _figures(results: Results, trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    rows = {(row.trial, row.entry): row for row in summarise(results, trials)}
    headings = ["engine", "type", "through", *(f"{trial.title}, {trial.unit}" for trial in trials)]
    lines = [
        [
            entry.title,
            SHORT[entry.dtype],
            entry.access,
            *(_cell(rows.get((trial.name, entry.name))) for trial in trials),
        ]
        for entry in results.entries
    ]
    return headings, lines


def _verdicts(results: Results, trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    named = {entry.name: f"{entry.title}, {SHORT[entry.dtype]}" for entry in results.entries}
    titles = {trial.name: trial.title for trial in trials}
    headings = ["trial", "ours", "best peer", "times as good", "wanted", "share of limit", "wanted", "met"]
    lines = []
    same_type = judge(results, trials, same_type=True)
    any_type = [one for one in judge(results, trials, same_type=False) if one not in same_type]
    for kind, verdicts in (("", same_type), (", any type", any_type)):
        lines += [
            [
                titles[one.trial] + kind, named[one.ours], named[one.peer], _range(one.ratio),
                _wanted(one), _percent(one.share_of_limit),
                "-" if one.wanted_share is None else f"{one.wanted_share:.0%}", _met(one),
            ]
            for one in verdicts
        ]  # fmt: skip
    return headings, lines


def _wanted(verdict: Verdict) -> str:
    return f"{verdict.wanted_ratio:g}" if verdict.wanted_value is None else f"a figure of {verdict.wanted_value:g}"


def _met(verdict: Verdict) -> str:
    return "yes" if verdict.met else "no"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.value is None:
        return "failed"
    share = f", {row.share_of_limit.median:.0%}" if row.share_of_limit else ""
    return f"{_range(row.value)}{share}"


def _range(value: Spread) -> str:
    return f"{_number(value.median)} ({_number(value.low)} to {_number(value.high)})"


def _percent(share: Spread | None) -> str:
    return "-" if share is None else f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounds(results: Results) -> int:
    return len({sample.round for sample in results.samples})
