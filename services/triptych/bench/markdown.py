"""Tables that commands keep up to date in Markdown files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from triptych.errors import InvalidRequest

END = "<!-- end -->"


def replace_section(file: Path, name: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- NAME -->` and `<!-- end -->`.

    Raises InvalidRequest when the file has no such place.
    """
    begin = f"<!-- {name} -->"
    before, found, rest = file.read_text("utf-8").partition(begin)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise InvalidRequest(f"{file} has no lines {begin} and {END} to put the figures between")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", "utf-8")


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])
