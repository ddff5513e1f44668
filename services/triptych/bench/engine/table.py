"""The figures as a table for people, in a terminal and in a Markdown file."""

import platform
from pathlib import Path

import torch
from rich.table import Table

from triptych.bench.engine.measure import Figure, Plan
from triptych.bench.markdown import replace_section, table_lines
from triptych.bench.statistics import Spread
from triptych.worker.cpu import library as native
from triptych.worker.cpu.build import KernelsUnavailable

HEADINGS = ("step", "ms", "tokens/s", "share of limit", "loop's share", "times transformers")
_UNITS = {"decode": "decode, {} sequences", "prefill": "prefill, {} tokens", "mixed": "{} decodes and a prompt"}


def table_of(figures: list[Figure], plan: Plan) -> Table:
    """A row per figure: medians, with the smallest and the largest sample where it matters."""
    table = Table(HEADINGS[0], title=title_of(plan), title_justify="left")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for figure in figures:
        table.add_row(*_cells(figure))
    return table


def write_report(figures: list[Figure], plan: Plan, file: Path) -> None:
    """Replaces one table in a Markdown file: the lines between `<!-- engine NAME -->` and `<!-- end -->`.

    NAME is the weights' format. Raises InvalidRequest when the file has no such place.
    """
    name = plan.dtype if plan.weights == "auto" else plan.weights
    table = table_lines(HEADINGS, map(_cells, figures))
    replace_section(file, f"engine {name}", f"{title_of(plan)}, {_machine()}:\n\n{table}")


def title_of(plan: Plan) -> str:
    """What was measured."""
    return f"{plan.model_dir.name}, {plan.dtype if plan.weights == 'auto' else plan.weights}"


def _machine() -> str:
    try:
        kernels = f"{native.best_isa()} kernels"
    except KernelsUnavailable:
        kernels = "torch"
    return f"{torch.get_num_threads()} threads, {kernels}, {platform.machine()}"


def _cells(figure: Figure) -> tuple[str, ...]:
    ratio = figure.ratio_to_transformers
    return (
        _UNITS[figure.kind].format(figure.size),
        f"{figure.seconds.median * 1e3:.1f}",
        f"{figure.tokens_per_s.median:.0f}",
        _percent(figure.share_of_limit),
        _percent(figure.loop_share),
        f"{ratio.median:.1f}" if ratio else "-",
    )


def _percent(share: Spread) -> str:
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
