"""Shells complete commands, options and names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRIPTYCH = str(Path(sys.executable).with_name("triptych"))


def complete(line: str, words: int) -> list[str]:
    """Returns what bash offers for the last of the line's words."""
    environment = {**os.environ, "_TRIPTYCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(words)}
    result = subprocess.run([TRIPTYCH], capture_output=True, text=True, timeout=60, env=environment, check=False)
    return result.stdout.split()


def test_commands_options_and_scenarios_are_completed() -> None:
    assert complete("triptych st", 1) == ["status"]
    assert "--concurrency" in complete("triptych bench serve --c", 3)
    assert complete("triptych bench serve --scenario m", 4) == ["multi-turn", "mixed"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_installs_into_the_users_shell(shell: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    result = subprocess.run(
        [TRIPTYCH, "--install-completion", shell],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("triptych" in text for text in written)
