"""NVIDIA's aiperf, a client that we did not write, runs against the gateway.

It needs other versions of our packages, so it lives in an environment of its own, which `make aiperf` makes.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.stack.conftest import Up
from triptych.config import bundled

PROGRAM = Path(__file__).resolve().parents[2] / ".venv-aiperf" / "bin" / "aiperf"
REQUESTS = 8

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def aiperf() -> Path:
    if not PROGRAM.exists():
        pytest.skip("needs aiperf: make aiperf")
    return PROGRAM


def test_aiperf_streams_pictures_through_the_gateway(served: Up, aiperf: Path, tmp_path: Path) -> None:
    model = bundled("models/demo")
    command = [
        str(aiperf), "profile", "--model", model.name, "--tokenizer", str(model.resolve()), "--url", served.http,
        "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--request-count", str(REQUESTS),
        "--concurrency", "2", "--synthetic-input-tokens-mean", "24", "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", "8", "--image-width-mean", "64", "--image-height-mean", "64", "--image-format", "png",
        "--artifact-dir", str(tmp_path), "--ui-type", "none", "--random-seed", "1",
        "--extra-inputs", json.dumps({"temperature": 0, "triptych": {"ignore_eos": True}}),
    ]  # fmt: skip  # Greedy: aiperf does not count an answer whose tokens happen to make no text.
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert not report.get("error_summary")
    assert report["request_count"]["avg"] == REQUESTS
    assert report["time_to_first_token"]["avg"] > 0
