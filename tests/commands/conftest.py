"""A `triptych up` as a person types it: no collector, spans kept in a cache folder of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stack.conftest import START_TIMEOUT_S, Up, environment_of, start_up
from triptych.stack import StackSettings
from triptych.worker.cpu.build import build_folder


@dataclass(frozen=True)
class Stack:
    """A running stack and how to type commands beside it."""

    up: Up
    environment: dict[str, str]
    cache: Path

    def triptych(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return triptych(*arguments, environment=self.environment)


def triptych(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "triptych.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    cache = tmp_path_factory.mktemp("cache")
    settings = StackSettings.from_environment().on_free_ports()
    environment = {name: value for name, value in environment_of(settings).items() if not name.startswith("OTEL_")}
    for name in ("TRIPTYCH_TRITON_TRACE_URL", "TRIPTYCH_TRACES"):
        environment.pop(name, None)
    kernels = str(build_folder())  # Where they are, or every worker with a cache of its own would build them anew.
    environment |= {
        "XDG_CACHE_HOME": str(cache),
        "TRIPTYCH_KERNELS_DIR": kernels,
        "COLUMNS": "120",
        "PATH": os.environ["PATH"],
    }
    up = start_up(environment)
    try:
        assert up.ready.wait(START_TIMEOUT_S), "\n".join(up.lines)
        assert up.process.poll() is None, "\n".join(up.lines)
        yield Stack(up, environment, cache)
    finally:
        if up.process.poll() is None:
            up.stop()
