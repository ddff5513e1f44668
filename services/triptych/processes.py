"""A child process that is watched: prefixed output, its last lines kept, no orphan on any path."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LOG_LINES_KEPT = 30
STOP_GRACE_S = 20.0
EXIT_POLL_S = 0.05
PR_SET_PDEATHSIG = 1

LogSink = Callable[[str, str], None]
"""Called with a service's name and one line of its output, without the newline."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to start a service and how to know that it is ready.

    Attributes:
        name: For log prefixes and messages.
        argv: Program and arguments.
        env: The child's whole environment.
        address: `host:port` where grpc.health.v1 answers; for HTTP services, a URL that answers 200 when ready.
        start_timeout_s: Most seconds from start to readiness.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: str
    start_timeout_s: float = 60.0


class ManagedProcess:
    """One running child in a process group of its own.

    The group, not just the child, is ended by `stop`: Triton's Python stubs are children of the child. If this process
    is killed outright, the kernel sends the child SIGTERM (Linux).
    """

    def __init__(self, spec: ServiceSpec, sink: LogSink) -> None:
        self.spec = spec
        self._sink = sink
        self._last_lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the child. Raises OSError when its program cannot be run."""
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            env=dict(self.spec.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._reader = asyncio.create_task(self._relay_output(), name=f"log-{self.spec.name}")

    @property
    def pid(self) -> int:
        """The child's process id, which is also its group's. Raises RuntimeError before `start`."""
        if self._process is None:
            raise RuntimeError("pid before start()")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code; None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def last_lines(self) -> list[str]:
        """The newest lines of its output."""
        return list(self._last_lines)

    async def wait(self) -> int:
        """Returns the exit code once the child has ended, even if its own children still hold its output open."""
        if self._process is None:
            raise RuntimeError("wait() before start()")
        # asyncio's Process.wait() also waits for the pipe, which Triton's Python stubs inherit and outlive Triton with.
        while (code := self._process.returncode) is None:
            await asyncio.sleep(EXIT_POLL_S)
        return code

    def signal_group(self, number: int) -> None:
        """Sends a signal to the child and its own children; nothing before `start` and after their end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Ends the child and its group: SIGTERM, after STOP_GRACE_S SIGKILL. Does nothing twice."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), STOP_GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _relay_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # A line over the stream's limit: drop what was buffered, keep reading.
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            self._last_lines.append(text)
            self._sink(self.spec.name, text)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """For `preexec_fn`: Linux sends the child SIGTERM when the thread that starts it ends in any way."""
    # Runs in the child between fork and exec: only an async-signal-safe call, on an already loaded library.
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
