"""Real services: one `triptych up` for all tests that do not hurt it, whichever folder they are in."""

import logging
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from tests.stack.conftest import START_TIMEOUT_S, Up, environment_of, start_up
from triptych.stack import StackSettings
from triptych.telemetry.span_store import SpanReceiver


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undoes what a command that ran in this process did to the root logger, lest the next test's records go there."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Returns a function that names the shared memory which this process has made since and which is still there.

    /dev/shm itself shows what tests beside this one make, too.
    """
    made: set[str] = set()
    make = SharedMemory.__init__

    def note(region: SharedMemory, *arguments: Any, **named: Any) -> None:
        make(region, *arguments, **named)
        made.add(region.name)

    monkeypatch.setattr(SharedMemory, "__init__", note)
    return lambda: {name for name in made if Path("/dev/shm", name).exists()}


@pytest.fixture(scope="session")
def receiver() -> Iterator[SpanReceiver]:
    with SpanReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def served(receiver: SpanReceiver) -> Iterator[Up]:
    settings = StackSettings.from_environment().on_free_ports()
    # Tests that send many requests at once must not lower the resolution of the next test's pictures.
    calm = {"TRIPTYCH_ROUTER_RESOLUTION_HOLD_S": "0"}
    up = start_up({**environment_of(settings), **receiver.environment(), **calm})
    try:
        assert up.ready.wait(START_TIMEOUT_S), "\n".join(up.lines)
        assert up.process.poll() is None, "\n".join(up.lines)
        yield up
    finally:
        if up.process.poll() is None:
            up.stop()
