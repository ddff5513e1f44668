"""The commands a newcomer types, for real."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.stack.conftest import START_TIMEOUT_S, Up, environment_of, start_up
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.stack import StackSettings

pytestmark = pytest.mark.integration


def triptych(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "triptych.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=cwd, check=False)


def family_of(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def test_demo_answers_and_prints_one_trace_as_json(tmp_path: Path) -> None:
    result = triptych("demo", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["answer"] == report["expected"] == ANSWER
    assert report["ttft_s"] > 0
    assert set(report["stages"]) == {"intake", "preprocess", "encode", "queue", "prefill", "decode"}
    assert {row["service"] for row in report["trace"]} == {"router", "triton", "worker"}
    assert [row["name"] for row in report["trace"] if row["parent"] is None] == ["router.generate"]


def test_ask_streams_an_answer_and_json_reports_it(served: Up) -> None:
    plain = triptych("ask", str(PICTURE), QUESTION, "--address", served.router)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip() == ANSWER
    assert "visual" in plain.stderr
    as_json = triptych("ask", str(PICTURE), QUESTION, "--address", served.router, "--json")
    assert json.loads(as_json.stdout)["answer"] == ANSWER


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_up_leaves_nothing_when_it_is_stopped_and_starts_again_on_the_same_ports(number: int) -> None:
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    for _ in range(2):
        up = start_up(environment)
        assert up.ready.wait(START_TIMEOUT_S) and up.process.poll() is None, "\n".join(up.lines)
        family = family_of(up.process.pid)
        assert len(family) >= 6  # up, Triton's keeper, tritonserver, at least one stub, worker, router
        assert up.stop(number) == 0, "\n".join(up.lines)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


def test_up_says_as_json_where_it_serves_and_health_agrees() -> None:
    settings = StackSettings.from_environment().on_free_ports()
    up = subprocess.Popen(
        [sys.executable, "-m", "triptych.cli", "up", "--json"],
        env=environment_of(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert up.stdout is not None
        addresses = json.loads(up.stdout.readline())
        assert addresses == {"router": settings.router_address, "gateway": settings.gateway_url}
        for address in (addresses["router"], f"{addresses['gateway']}/ready"):
            health = triptych("health", address, "--json")
            assert json.loads(health.stdout) == {"address": address, "serving": True}
            assert health.returncode == 0
    finally:
        up.terminate()
        rest, _ = up.communicate(timeout=60)
    assert up.returncode == 0
    assert rest == ""


def test_up_stopped_while_starting_leaves_nothing() -> None:
    up = start_up(environment_of(StackSettings.from_environment().on_free_ports()))
    while len(family_of(up.process.pid)) < 4:
        time.sleep(0.05)
    family = family_of(up.process.pid)
    assert up.stop() == 0, "\n".join(up.lines)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


@pytest.mark.parametrize("victim", ["tritonserver", "worker"])
def test_up_stops_all_and_fails_when_one_service_dies(victim: str) -> None:
    up = start_up(environment_of(StackSettings.from_environment().on_free_ports()))
    assert up.ready.wait(START_TIMEOUT_S) and up.process.poll() is None, "\n".join(up.lines)
    family = family_of(up.process.pid)
    next(
        process for process in family if process.cmdline()[0].endswith(victim) or process.cmdline()[-1] == victim
    ).kill()
    assert up.process.wait(timeout=40) == 1
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert any("ended with exit code" in line for line in up.lines)


def test_a_second_up_on_the_same_ports_says_which_port_and_knob(served: Up) -> None:
    port = served.router.rpartition(":")[2]
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    up = start_up({**environment, "TRIPTYCH_ROUTER_PORT": port})
    assert up.process.wait(timeout=30) == 1
    assert up.ready.wait(5)
    assert f"port {port}" in " ".join(up.lines) and "TRIPTYCH_ROUTER_PORT" in " ".join(up.lines)


def test_up_with_a_wrong_model_folder_says_so(tmp_path: Path) -> None:
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    up = start_up({**environment, "TRIPTYCH_WORKER_MODEL_DIR": str(tmp_path / "nowhere")})
    assert up.process.wait(timeout=60) == 1
    up.ready.wait(5)
    text = " ".join(up.lines)
    assert "nowhere" in text and "Traceback" not in text
