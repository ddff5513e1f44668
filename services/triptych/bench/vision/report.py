"""The figures as a table and as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.bench.vision.figures import Figures, Outcome
from triptych.errors import Unavailable

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1 << 20


def table_of(figures: Figures) -> "Table":
    """Returns a column per rule."""
    from rich.table import Table

    rules = [figures.pixels, figures.count]
    table = Table(
        "",
        f"at most {figures.budget / 1e6:.1f} M pixels",
        f"at most {figures.count_limit} images",
        title=f"predicted for the pixel budget: {figures.predicted_bytes / MIB:.0f} MiB above idle",
    )
    rows: list[tuple[str, list[str]]] = [
        ("images in a batch, mean", [f"{rule.mean_batch:.1f}" for rule in rules]),
        ("largest batch, M pixels", [f"{max(b.pixels for b in rule.batches) / 1e6:.1f}" for rule in rules]),
        ("peak memory above idle, MiB", [f"{rule.peak_bytes / MIB:.0f}" for rule in rules]),
        ("peak over prediction", [f"{rule.peak_bytes / figures.predicted_bytes:.2f}" for rule in rules]),
        ("variation of the batches' peaks", [f"{rule.variation:.2f}" for rule in rules]),
        ("images/s", [f"{rule.images_per_s:.1f}" for rule in rules]),
        ("encode latency p50, s", [f"{rule.latency_s(0.5):.2f}" for rule in rules]),
        ("encode latency p99, s", [f"{rule.latency_s(0.99):.2f}" for rule in rules]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def write_plot(figures: Figures, path: Path) -> None:
    """Draws each batch's peak memory over time under both rules, and the distribution of latencies.

    Raises Unavailable when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unavailable("no plots without matplotlib: pip install 'triptych[bench]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, latency = figure.subplots(1, 2, width_ratios=(3, 2))
    names = {"pixels": "bounded by pixels", "count": f"bounded by count ({figures.count_limit} images)"}
    for rule, colour in ((figures.count, "#c8553d"), (figures.pixels, "#2a6f97")):
        _draw_memory(memory, rule, names[rule.rule], colour)
        values = sorted(rule.latencies_s)
        shares = [(index + 1) / len(values) for index in range(len(values))]
        latency.step(values, shares, where="post", color=colour, label=names[rule.rule])
    memory.axhline(
        figures.predicted_bytes / MIB, color="black", linestyle="--", linewidth=1, label="predicted for the budget"
    )
    memory.set(xlabel="seconds", ylabel="peak memory of a batch above idle, MiB", title="the encoder's memory")
    memory.set_ylim(bottom=0)
    latency.set(xlabel="seconds from queue to features", ylabel="share of images", title="encode latency", ylim=(0, 1))
    for axes in (memory, latency):
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=110)


def _draw_memory(axes: Any, rule: Outcome, label: str, colour: str) -> None:
    start_s = rule.batches[0].start_s
    for index, batch in enumerate(rule.batches):
        span = [batch.start_s - start_s, batch.end_s - start_s]
        peak = batch.peak_bytes / MIB
        axes.fill_between(span, [peak, peak], color=colour, alpha=0.35, linewidth=0)
        axes.plot(span, [peak, peak], color=colour, linewidth=1.5, label=label if index == 0 else None)
