"""What the processes that compute in a Triton hold in memory, sampled while it works. Linux only."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.002
_STUB = "triton_python_b"
"""First letters of the name of the processes in which Python-based backends compute, as the kernel keeps it."""


def computing_processes(triton_pid: int) -> list[int]:
    """Returns the ids of a Triton's stubs, or Triton's own where its backends compute in it."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            names[int(entry.name)] = name
            children.setdefault(int(rest.split()[1]), []).append(int(entry.name))
    family, new = [triton_pid], [triton_pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        family += new
    return [pid for pid in family if names.get(pid, "").startswith(_STUB)] or [triton_pid]


def resident_bytes(pids: list[int]) -> int:
    """Returns the anonymous memory that the processes hold in RAM together.

    That is what computing takes. Images and features on their way to and from a stub lie in shared memory, which is
    not in it: that grows to the largest batch and stays.
    """
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.partition("RssAnon:")[2].split()[0]) << 10
    return total


class MemorySampler:
    """Samples in a thread of its own; `peak` answers for any span of time on time.monotonic's clock."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()

    def peak(self, start_s: float, end_s: float) -> int:
        """Returns the highest sample within a span, in bytes; 0 when there is none."""
        return max((size for at_s, size in self.samples if start_s <= at_s <= end_s), default=0)

    @contextmanager
    def running(self) -> Iterator["MemorySampler"]:
        """Samples for the length of the block."""
        thread = threading.Thread(target=self._run, name="memory", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.samples.append((time.monotonic(), resident_bytes(self._pids)))
