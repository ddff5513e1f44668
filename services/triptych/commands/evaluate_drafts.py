"""`triptych evaluate --draft`: what draft encoding costs and brings, through a running stack."""

from statistics import median

from triptych.bench.markdown import table_lines
from triptych.commands.ways import Measured

HEADINGS = ("way", "kept", "exact answers", "encode ms", "draft ms", "prefill ms", "first token ms")


def draft_lines(count: int, measured: dict[str, Measured]) -> list[str]:
    """Returns a table and verdicts, in Markdown; `measured` begins with `none`, the others are drafts."""
    rows = [
        [
            "no draft" if name == "none" else name,
            "-" if name == "none" else _kept(each),
            each.exact,
            *(f"{each.median_ms(stage):.1f}" for stage in ("encode", "draft", "prefill", "time_to_first_token")),
        ]
        for name, each in measured.items()
    ]
    similarities = sorted(value for each in measured.values() for value in each.similarities)
    spread = (
        f"Similarity of draft and encoder, an image's mean: median {median(similarities):.3f}, lowest "
        f"{similarities[0]:.3f}, highest {similarities[-1]:.3f}."
        if similarities
        else "No draft was compared."
    )
    return [
        f"{count} held-out scenes, one question at a time; times are medians over the first question of each dialogue:",
        "",
        table_lines(HEADINGS, rows),
        "",
        f"- {spread}",
        *(f"- {line}" for line in _verdicts(measured)),
    ]


def _kept(each: Measured) -> str:
    """Returns the share of drafts that were kept among all first questions, and what became of the others."""
    asked = len(each.seconds["encode"])
    others = (f"{number} {outcome}" for outcome, number in sorted(each.outcomes.items()) if outcome != "kept")
    return ", ".join([f"{100 * each.outcomes['kept'] / asked:.0f} %", *others])


def _verdicts(measured: dict[str, Measured]) -> list[str]:
    without_ms = measured["none"].median_ms("time_to_first_token")
    lines = []
    for name, each in measured.items():
        if name != "none":
            with_ms = each.median_ms("time_to_first_token")
            verdict = "loses" if with_ms >= without_ms else "wins"
            lines.append(f"{name} {verdict}: {with_ms:.1f} ms to the first token, {without_ms:.1f} ms without a draft.")
    return lines
