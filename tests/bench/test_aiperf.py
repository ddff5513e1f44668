"""NVIDIA's aiperf, a client that we did not write, runs against the gateway.

It needs other versions of our packages, so it lives in an environment of its own: TRIPTYCH_TEST_AIPERF names its
program.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.stack.conftest import Up
from triptych.config import bundled

VERSION = "0.13.0"
REQUESTS = 8

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def aiperf() -> Path:
    named = os.environ.get("TRIPTYCH_TEST_AIPERF")
    if not named:
        pytest.skip(f"TRIPTYCH_TEST_AIPERF names no aiperf {VERSION}; docs/benchmarking.md says how to install one")
    return Path(named)


def test_aiperf_streams_pictures_through_the_gateway(served: Up, aiperf: Path, tmp_path: Path) -> None:
    model = bundled("models/demo")
    command = [
        str(aiperf), "profile", "--model", model.name, "--tokenizer", str(model.resolve()), "--url", served.http,
        "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--request-count", str(REQUESTS),
        "--concurrency", "2", "--synthetic-input-tokens-mean", "24", "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", "8", "--image-width-mean", "64", "--image-height-mean", "64", "--image-format", "png",
        "--artifact-dir", str(tmp_path), "--ui-type", "none", "--random-seed", "1",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["time_to_first_token"]["avg"] > 0
    assert not report.get("error_summary")
