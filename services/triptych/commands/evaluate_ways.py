"""`triptych evaluate --reduce … --draft …`: token reductions and drafts beside plain answers."""

import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from triptych import client
from triptych.bench.markdown import replace_section
from triptych.commands.evaluate_drafts import draft_lines
from triptych.commands.evaluate_tokens import reduction_lines
from triptych.commands.ways import measure
from triptych.vision.reduction_spec import parse_reduction


def run(
    count: int, address: str | None, reductions: list[str], thresholds: list[float], report: Path | None, as_json: bool
) -> None:
    """Prints exact answers and times for each reduction and each draft threshold; renews the tables in `report`.

    Raises InvalidRequest for a reduction that nobody knows, or when the report has no place for a table.
    """
    reduced = {str(parse_reduction(text)): client.Options(reduce=text) for text in reductions if parse_reduction(text)}
    drafted = {f"draft, kept at {value:g}": client.Options(draft=True, draft_threshold=value) for value in thresholds}
    if thresholds:
        early = client.Options(draft=True, draft_threshold=thresholds[0], early_text=True)
        drafted["the first, text at once"] = early
    plain = {"none": client.Options(reduce="none", draft=False)}
    measured = asyncio.run(measure(count, address, plain | reduced | drafted))
    sections = {}
    if reduced:
        sections["reductions"] = reduction_lines(count, {name: measured[name] for name in plain | reduced})
    if drafted:
        sections["drafts"] = draft_lines(count, {name: measured[name] for name in plain | drafted})
    if report is not None:
        for name, lines in sections.items():
            replace_section(report, name, "\n".join(lines))
    if as_json:
        print(json.dumps({"scenes": count, "ways": {name: each.plain() for name, each in measured.items()}}))
    else:
        for lines in sections.values():
            Console().print(Markdown("\n".join(lines)))
