"""The command line: what a newcomer types wrong gets an answer that helps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.config import GatewaySettings, RouterSettings, TritonSettings, WorkerSettings

pytestmark = pytest.mark.slow


def triptych(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    import os

    return subprocess.run(
        [sys.executable, "-m", "triptych.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_every_knob_is_printed_with_its_meaning() -> None:
    result = triptych("config", "--json", TRIPTYCH_WORKER_MAX_RUNNING="7")
    knobs = {knob["variable"]: knob for knob in json.loads(result.stdout)}
    expected = sum(len(cls.model_fields) for cls in (TritonSettings, WorkerSettings, RouterSettings, GatewaySettings))
    assert len(knobs) == expected
    assert knobs["TRIPTYCH_WORKER_MAX_RUNNING"]["value"] == "7"
    assert all(knob["meaning"] for knob in knobs.values())


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_knob_out_of_range_is_named(value: str) -> None:
    result = triptych("config", TRIPTYCH_WORKER_MAX_RUNNING=value)
    assert result.returncode == 2
    assert "TRIPTYCH_WORKER_MAX_RUNNING" in result.stderr and value in result.stderr
    assert "Traceback" not in result.stderr


def test_asking_where_nobody_listens_says_what_to_do() -> None:
    result = triptych("ask", "hello", "--address", "127.0.0.1:1", "--timeout-s", "5")
    assert result.returncode == 1
    assert "triptych up" in result.stderr and "Traceback" not in result.stderr


def test_asking_about_a_missing_picture_names_it() -> None:
    result = triptych("ask", "nowhere.png", "what is it?")
    assert result.returncode == 1
    assert "nowhere.png" in result.stderr


def test_forgetting_the_question_is_noticed(tmp_path: Path) -> None:
    picture = tmp_path / "photo.png"
    picture.write_bytes(b"x")
    result = triptych("ask", str(picture))
    assert result.returncode == 1
    assert "question comes last" in result.stderr


def test_a_reduction_that_nobody_knows_is_refused_with_the_rule() -> None:
    result = triptych("ask", "hello", "--reduce", "pool:4")
    assert result.returncode == 1
    assert "kmeans:N" in result.stderr and "REDUCTION_INVALID" in result.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    result = triptych("serv")
    assert result.returncode == 2
    assert "No such command" in result.stderr


def test_kernels_says_what_is_ready_and_where() -> None:
    result = triptych("kernels", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["isa"] in ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
    assert list(Path(report["folder"]).glob("triptych-kernels-*.so"))


def test_kernels_without_a_compiler_says_what_happens_instead(tmp_path: Path) -> None:
    result = triptych("kernels", TRIPTYCH_KERNELS_DIR=str(tmp_path), PATH="", CXX=str(tmp_path / "none"))
    assert result.returncode == 1
    assert "torch will compute instead" in result.stderr and "Traceback" not in result.stderr
