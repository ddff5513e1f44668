"""Finding, starting and stopping: what happens when something is wrong, and what is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.triton.conftest import settings_for
from triptych.config import TritonSettings
from triptych.errors import Unavailable
from triptych.triton import install
from triptych.triton.backends import check_stub, prepare_backends
from triptych.triton.install import Installation, find_installation
from triptych.triton.launch import plan_launch
from triptych.triton.server import TritonServer


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def stuck_server(folder: Path) -> Path:
    """A tritonserver that starts, says something and never gets ready, as when a stub has died."""
    script = '[ "$1" = --help ] && exit 0\necho "loading: vision_encoder:1"\necho waiting for the stub >&2\nsleep 600'
    backends = folder / "backends" / "onnxruntime"
    backends.mkdir(parents=True)
    (backends / "libtriton_onnxruntime.so").touch()
    return write_script(folder / "bin" / "tritonserver", script)


def test_a_configured_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"TRIPTYCH_TRITON_TRITONSERVER is .*nowhere") as raised:
        find_installation(tmp_path / "nowhere")
    assert raised.value.reason == "TRITON_NOT_FOUND"


def test_without_any_server_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_wheel", lambda: None)
    with pytest.raises(Unavailable, match="make venv"):
        find_installation(path="")


def test_a_server_on_path_wins_over_the_wheel(tmp_path: Path) -> None:
    server = stuck_server(tmp_path)
    found = find_installation(path=str(server.parent))
    assert found == Installation(server, tmp_path / "backends")


def test_a_server_with_its_own_onnxruntime_keeps_its_backends_untouched(tmp_path: Path) -> None:
    found = find_installation(stuck_server(tmp_path / "opt"))
    assert prepare_backends(found, tmp_path / "ours") == tmp_path / "opt" / "backends"
    assert not (tmp_path / "ours").exists()


def test_the_wheel_is_found_without_importing_pytriton() -> None:
    code = (
        "import sys; from triptych.triton.install import find_wheel; assert find_wheel(); "
        "assert not {'pytriton', 'torch', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="triptych export") as raised:
        plan_launch(settings_for(tmp_path / "nothing"), tmp_path / "work")
    assert raised.value.reason == "MODEL_REPOSITORY_MISSING"


def test_the_plan_follows_the_settings(tmp_path: Path) -> None:
    server = stuck_server(tmp_path)
    url = "http://127.0.0.1:4318/v1/traces"
    explicit = settings_for(tmp_path, tritonserver=server, control_mode="explicit", trace_url=url, grpc_port=12345)
    argv = plan_launch(explicit, tmp_path / "work").argv
    assert argv[0] == str(server)
    assert {"--grpc-port=12345", "--model-control-mode=explicit", "--load-model=*"} <= set(argv)
    assert {f"--trace-config=opentelemetry,url={url}", "--trace-config=rate=1"} <= set(argv)
    untraced = plan_launch(settings_for(tmp_path, tritonserver=server), tmp_path / "work").argv
    assert "--repository-poll-secs=1" in untraced
    assert not any("trace" in flag for flag in untraced)


def test_client_shared_memory_is_asked_for_where_the_server_knows_it(tmp_path: Path) -> None:
    server = stuck_server(tmp_path)
    assert "--allow-client-shm=true" not in plan_launch(settings_for(tmp_path, tritonserver=server), tmp_path).argv
    write_script(server, 'echo "  --allow-client-shm <boolean>"')
    assert "--allow-client-shm=true" in plan_launch(settings_for(tmp_path, tritonserver=server), tmp_path).argv


def test_a_stub_that_cannot_be_loaded_is_reported_at_once(tmp_path: Path) -> None:
    stub = write_script(tmp_path / "stub", 'echo "error while loading shared libraries: libcudart.so" >&2; exit 127')
    with pytest.raises(Unavailable, match="libcudart") as raised:
        check_stub(stub, os.environ)
    assert raised.value.reason == "TRITON_START_FAILED"


def test_a_taken_port_is_named_with_its_knob(settings: TritonSettings) -> None:
    with (
        socket.create_server((settings.host, settings.http_port)),
        pytest.raises(Unavailable, match="TRIPTYCH_TRITON_HTTP_PORT") as raised,
    ):
        TritonServer(settings).start()
    assert raised.value.reason == "PORT_TAKEN"


def test_a_server_that_never_gets_ready_ends_with_its_last_words(tmp_path: Path) -> None:
    server = TritonServer(settings_for(tmp_path, tritonserver=stuck_server(tmp_path), start_timeout_s=1))
    started = time.monotonic()
    with pytest.raises(Unavailable, match="within 1 s") as raised, server:
        pass
    assert time.monotonic() - started < 5
    assert raised.value.reason == "TRITON_START_TIMEOUT"
    assert "waiting for the stub" in str(raised.value)
    assert server.pid is not None and not group_members(server.pid)


def test_a_server_that_ends_at_once_does_not_use_up_the_limit(tmp_path: Path) -> None:
    server = stuck_server(tmp_path)
    write_script(server, "echo cannot go on; exit 3")
    with (
        pytest.raises(Unavailable, match="cannot go on") as raised,
        TritonServer(settings_for(tmp_path, tritonserver=server)),
    ):
        pass
    assert raised.value.reason == "TRITON_DIED"


@pytest.mark.integration
def test_a_broken_model_at_the_start_is_an_error_with_its_reason(settings: TritonSettings) -> None:
    (settings.model_repository / "projector" / "1" / "model.onnx").write_bytes(b"this is no model")
    with pytest.raises(Unavailable, match=r"projector: .*ONNX Runtime cannot load") as raised, TritonServer(settings):
        pass
    assert raised.value.reason == "MODEL_LOAD_FAILED"


@pytest.mark.integration
def test_a_killed_server_leaves_nothing_and_the_port_can_be_used_again(settings: TritonSettings) -> None:
    with TritonServer(settings) as server:
        assert server.pid is not None
        assert len(group_members(server.pid)) > 1  # Its stubs.
        assert shared_memory(server)
        os.kill(server.pid, signal.SIGKILL)
    assert not group_members(server.pid)
    assert not shared_memory(server)
    with TritonServer(settings) as again:
        assert again.pid is not None
    assert again.returncode == 0
    assert not group_members(again.pid)
    assert not shared_memory(again)


@pytest.mark.integration
def test_serve_ends_cleanly_on_a_signal(settings: TritonSettings) -> None:
    environment = {
        **os.environ,
        **{f"TRIPTYCH_TRITON_{name.upper()}": str(value) for name, value in settings if value is not None},
    }
    code = (
        "import sys; from triptych.config import TritonSettings; from triptych.telemetry.logs import setup_logging; "
        "from triptych.triton.server import serve; setup_logging('triton'); sys.exit(serve(TritonSettings()))"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("ready: gRPC on" in line for line in process.stderr)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 1
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(20) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def group_members(group: int) -> list[int]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def shared_memory(server: TritonServer) -> list[Path]:
    assert server.launch is not None
    return list(Path("/dev/shm").glob(f"{server.launch.shm_prefix}*"))
