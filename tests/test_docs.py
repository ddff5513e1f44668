"""The documents say what the code says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_error_reason_is_documented() -> None:
    documented = (ROOT / "docs" / "errors.md").read_text()
    pattern = re.compile(r'\b(?:reason=|default_reason = |reason: str = )"([A-Z_]+)"')
    reasons = {reason for path in (ROOT / "services").rglob("*.py") for reason in pattern.findall(path.read_text())}
    assert len(reasons) > 30
    assert not {reason for reason in reasons if f"`{reason}`" not in documented}


def test_no_documented_reason_is_gone_from_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    documented = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", (ROOT / "docs" / "errors.md").read_text()))
    assert not {reason for reason in documented if f'"{reason}"' not in code and not reason.startswith("DEGRADATION")}


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for path in texts for name in re.findall(r"`make ([a-z]+)`", path.read_text())}
    assert named <= targets
