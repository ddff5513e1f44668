"""Runs a tritonserver as a child process: start, readiness, last words, and an end that leaves nothing behind."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from triptych.config import TritonSettings
from triptych.errors import TriptychError, Unavailable
from triptych.ports import check_ports, reachable
from triptych.processes import end_with_parent
from triptych.triton.launch import EXIT_TIMEOUT_S, Launch, plan_launch
from triptych.triton.readiness import wait_ready
from triptych.triton.relay import linked_traces

__all__ = ["TritonServer", "plan_launch", "serve", "wait_ready"]

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


class TritonServer:
    """One tritonserver, its Python stubs, its private backend directory and, where it traces, its span relay.

    Use it as a context manager (starts, waits until ready, stops), or call start, wait_ready and stop. Not
    thread-safe. The process is the leader of a group of its own, so Ctrl-C in a terminal does not reach it by itself.
    """

    def __init__(
        self,
        settings: TritonSettings,
        on_line: Callable[[str], None] | None = None,
        *,
        die_with_parent: bool = False,
    ) -> None:
        """Starts nothing yet.

        `on_line` gets every line Triton writes, from another thread. With `die_with_parent` Linux stops Triton when
        the *thread* that calls `start` ends in any way; only a program that starts it from its main thread wants it.
        """
        self._settings = settings
        self._on_line = on_line
        self._die_with_parent = die_with_parent
        self._lines: deque[str] = deque(maxlen=200)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._launch: Launch | None = None
        self._resources = contextlib.ExitStack()

    @property
    def http_address(self) -> str:
        """host:port for readiness; a server that listens everywhere is asked on this machine."""
        return f"{reachable(self._settings.host)}:{self._settings.http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port for inference."""
        return f"{reachable(self._settings.host)}:{self._settings.grpc_port}"

    @property
    def pid(self) -> int | None:
        """The process id, None before the start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """The exit status (negative: killed by that signal), None while it runs or before it started."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def launch(self) -> Launch | None:
        """What it was started with, None before the start."""
        return self._launch

    def last_lines(self) -> list[str]:
        """The last lines Triton wrote, oldest first, at most 200; of one that has ended, its very last words too."""
        if self._reader is not None and not self.running:
            self._reader.join(1)  # Not for ever: its stubs may live on and hold the pipe open.
        return list(self._lines)

    def start(self) -> None:
        """Starts the process. Raises Unavailable: no server, a broken stub, no repository, a port that is taken."""
        if self._process is not None:
            raise RuntimeError("a TritonServer is started once")
        check_ports(self._settings.host, self._settings, "grpc_port", "http_port", "metrics_port")
        try:
            workdir = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="triptych-triton-"))
            settings = self._resources.enter_context(linked_traces(self._settings))
            self._launch = plan_launch(settings, Path(workdir))
            self._process = subprocess.Popen(
                self._launch.argv,
                env=self._launch.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=end_with_parent if self._die_with_parent else None,
            )
        except OSError as error:
            self._resources.close()
            raise Unavailable(f"tritonserver cannot be started: {error}", reason="TRITON_START_FAILED") from error
        except BaseException:
            self._resources.close()
            raise
        self._reader = threading.Thread(target=self._read_lines, name="triton-log", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float | None = None, keep_waiting: Callable[[], bool] = lambda: True) -> None:
        """Returns when all models are ready; errors as in `readiness.wait_ready`. Default limit: start_timeout_s."""
        limit = self._settings.start_timeout_s if timeout_s is None else timeout_s
        wait_ready(self.http_address, limit, lambda: self.running and keep_waiting(), self.last_lines)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the process to end by itself and returns its status, None after `timeout_s`."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = EXIT_TIMEOUT_S + 5.0) -> None:
        """Ends Triton and every process of its group: SIGTERM, after `grace_s` SIGKILL. Safe to call again."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            if process.poll() is None:
                process.kill()
                process.wait()
            _kill_group(process.pid)
        if self._reader is not None:
            self._reader.join()  # Ends with the last process that holds the pipe.
            self._reader = None
        if process is not None and process.stdout is not None:
            process.stdout.close()
        if self._launch is not None:
            remove_shared_memory(self._launch.shm_prefix)
        self._resources.close()

    def __enter__(self) -> "TritonServer":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read_lines(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            if not text or text.startswith(("+-", "| ")):  # Tables of everything it was told: noise, 200 columns wide.
                continue
            self._lines.append(text)
            if self._on_line is not None:
                self._on_line(text)


def serve(settings: TritonSettings) -> int:
    """Runs Triton until SIGTERM, SIGINT or its own end, its output on stderr. Call it from the main thread.

    Returns 0 after a signal, 1 when Triton could not be started or ended by itself.
    """
    stopping = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server = TritonServer(settings, lambda line: print(line, file=sys.stderr, flush=True), die_with_parent=True)
    try:
        server.start()
        server.wait_ready(keep_waiting=lambda: not stopping.is_set())
        log.info("ready: gRPC on %s, HTTP on %s", server.grpc_address, server.http_address)
        while not stopping.wait(0.2) and server.running:
            pass
        if not stopping.is_set():
            log.error("tritonserver has ended with status %s", server.returncode)
    except TriptychError as error:
        if not stopping.is_set():
            log.error("%s", error)
    finally:
        server.stop()
    return 0 if stopping.is_set() else 1


def remove_shared_memory(prefix: str) -> None:
    """Removes the regions that a killed server and its stubs have left under /dev/shm."""
    for region in _SHARED_MEMORY.glob(f"{prefix}*") if _SHARED_MEMORY.is_dir() else ():
        region.unlink(missing_ok=True)


def _kill_group(group: int) -> None:
    """Kills what is left of a process group and waits, at most two seconds, until it is gone."""
    deadline = time.monotonic() + 2
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.02)
