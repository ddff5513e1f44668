"""The README's examples for HTTP clients, run as they stand against a running stack."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.conftest import Up

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    (language, code)
    for language, code in re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "127.0.0.1:8080" in code
]


def test_there_is_an_example_for_each_client() -> None:
    assert [next(word for word in ("curl", "langchain", "openai") if word in code) for _, code in EXAMPLES] == [
        "curl",
        "openai",
        "langchain",
    ]


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=["curl", "openai", "LangChain"])
def test_an_example_prints_an_answer(served: Up, language: str, code: str) -> None:
    command = ["bash", "-euc"] if language == "sh" else [sys.executable, "-c"]
    code = code.replace("http://127.0.0.1:8080", served.http)
    result = subprocess.run([*command, code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    if language == "sh":
        assert '"finish_reason"' in result.stdout
