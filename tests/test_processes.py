"""Children are ended on every path, and a failed start says why."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from triptych.errors import Unavailable
from triptych.ports import free_ports, port_is_free
from triptych.processes import ManagedProcess, ServiceSpec
from triptych.stack import Stack

FAMILY = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def spec(code: str, timeout_s: float = 5.0) -> ServiceSpec:
    argv = (sys.executable, "-u", "-c", code)
    return ServiceSpec("child", argv, dict(os.environ), f"127.0.0.1:{free_ports(1)[0]}", timeout_s)


def await_end(pid: int) -> None:
    """Waits until a process that is not our child has ended; fails if it lives on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + 5
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.05)


async def test_stop_ends_the_child_and_its_children() -> None:
    lines: list[str] = []
    process = ManagedProcess(spec(FAMILY), lambda name, line: lines.append(line))
    await process.start()
    while not lines:
        await asyncio.sleep(0.02)
    await process.stop()
    assert process.exit_code == -signal.SIGTERM
    await_end(int(lines[0]))


async def test_a_service_that_dies_while_starting_is_reported_with_its_last_words() -> None:
    stack = Stack([spec("print('out of cheese'); raise SystemExit(3)")], lambda name, line: None)
    with pytest.raises(ExceptionGroup) as caught:
        await stack.start()
    await stack.stop()
    error = caught.value.exceptions[0]
    assert isinstance(error, Unavailable)
    assert "exit code 3" in error.message and "out of cheese" in error.message


async def test_a_service_that_never_gets_ready_is_reported_within_its_time() -> None:
    stack = Stack([spec("import time; print('waiting for nobody'); time.sleep(600)", 1.0)], lambda name, line: None)
    started = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        await stack.start()
    await stack.stop()
    assert time.monotonic() - started < 10
    assert "waiting for nobody" in str(caught.value.exceptions[0])


async def test_a_very_long_line_does_not_end_the_log() -> None:
    lines: list[str] = []
    process = ManagedProcess(spec("print('x' * 1_000_000); print('after')"), lambda name, line: lines.append(line))
    await process.start()
    await process.wait()
    await process.stop()
    assert lines[-1] == "after"


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import asyncio, os, sys
from triptych.processes import ManagedProcess, ServiceSpec
async def main():
    child = ManagedProcess(ServiceSpec("c", ("sleep", "600"), dict(os.environ), "x:1"), print)
    await child.start()
    open({str(pid_file)!r}, "w").write(str(child._process.pid))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    await_end(int(pid_file.read_text()))


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(port_is_free("127.0.0.1", port) for port in ports)
