"""The figures as a table for people."""

from rich.table import Table

from triptych.bench.engine.measure import Figure
from triptych.bench.statistics import Spread


def table_of(figures: list[Figure], title: str) -> Table:
    """A row per figure: medians, with the smallest and the largest sample where it matters."""
    table = Table("step", title=title, title_justify="left")
    for column in ("ms", "tokens/s", "share of limit", "loop's share", "x transformers"):
        table.add_column(column, justify="right")
    for figure in figures:
        unit = {"decode": "decode, {} sequences", "prefill": "prefill, {} tokens", "mixed": "{} decodes + prompt"}
        table.add_row(
            unit[figure.kind].format(figure.size),
            f"{figure.seconds.median * 1e3:.1f}",
            f"{figure.tokens_per_s.median:.0f}",
            _percent(figure.share_of_limit),
            _percent(figure.loop_share),
            f"{figure.ratio_to_transformers.median:.1f}" if figure.ratio_to_transformers else "-",
        )
    return table


def _percent(share: Spread) -> str:
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
