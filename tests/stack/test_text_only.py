"""A language model without a vision tower is served by `triptych up`, and needs no Triton."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.stack.conftest import START_TIMEOUT_S, environment_of, start_up
from tests.worker.checkpoints import write_text_only
from triptych.stack import StackSettings

pytestmark = pytest.mark.integration


def test_a_text_only_checkpoint_is_served_without_triton(tmp_path: Path) -> None:
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    environment["TRIPTYCH_WORKER_MODEL_DIR"] = str(write_text_only(tmp_path / "tiny-text"))
    up = start_up(environment)
    try:
        assert up.ready.wait(START_TIMEOUT_S) and up.process.poll() is None, "\n".join(up.lines)
        assert not any("triton |" in line for line in up.lines)
        with urllib.request.urlopen(f"{up.http}/v1/models") as reply:
            (card,) = json.load(reply)["data"]
        assert (card["id"], card["triptych"]["max_images"]) == ("tiny-text", 0)
        command = ("bench", "serve", "--url", f"{up.http}/v1", "--requests", "2", "--repeats", "1")
        small = ("--prompt-tokens", "4", "--output-tokens", "5", "--json")
        run = subprocess.run([sys.executable, "-m", "triptych.cli", *command, *small], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        figures = json.loads(run.stdout.splitlines()[-1])["results"][0]["rounds"][0]["figures"]
        assert (figures["requests"], figures["output_tokens"]) == (2, 10)
    finally:
        up.stop(signal.SIGTERM)
