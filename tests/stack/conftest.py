"""Starting `triptych up` from a test, and looking at what it does."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from triptych.rpc.channel import open_channel
from triptych.stack import StackSettings
from triptych.v1 import worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 120.0


@dataclass
class Up:
    """A `triptych up` that a test started."""

    process: "subprocess.Popen[str]"
    router: str
    worker: str
    http: str
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if "serving on" in line:
                self.ready.set()
        self.ready.set()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=40)


def environment_of(settings: StackSettings) -> dict[str, str]:
    """Returns this process's environment with the ports of `settings`; nothing is kept in the user's cache folder."""
    ports = {
        "TRIPTYCH_TRITON_GRPC_PORT": settings.triton.grpc_port,
        "TRIPTYCH_TRITON_HTTP_PORT": settings.triton.http_port,
        "TRIPTYCH_TRITON_METRICS_PORT": settings.triton.metrics_port,
        "TRIPTYCH_WORKER_PORT": settings.worker.port,
        "TRIPTYCH_ROUTER_PORT": settings.router.port,
    }
    if settings.gateway is not None:
        ports["TRIPTYCH_GATEWAY_PORT"] = settings.gateway.port
    return {**os.environ, "TRIPTYCH_TRACES": "0", **{name: str(port) for name, port in ports.items()}}


def start_up(environment: dict[str, str]) -> Up:
    """Starts `triptych up`; the caller waits for `ready` and stops it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "triptych.cli", "up"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    router = f"127.0.0.1:{environment['TRIPTYCH_ROUTER_PORT']}"
    worker = f"127.0.0.1:{environment['TRIPTYCH_WORKER_PORT']}"
    up = Up(process, router, worker, f"http://127.0.0.1:{environment['TRIPTYCH_GATEWAY_PORT']}")
    threading.Thread(target=up.read, daemon=True).start()
    return up


def noise_png(seed: int, side: int = 128) -> bytes:
    """Returns a picture that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def load_of(worker: str) -> worker_pb2.WorkerLoad:
    """Returns the worker's present load."""
    async with open_channel(worker) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest(), timeout=10)
        async for load in call:
            return load
    raise AssertionError("WatchLoad ended without a word")


async def wait_idle(worker: str, timeout_s: float = 10.0) -> worker_pb2.WorkerLoad:
    """Returns the load once nothing waits, runs or holds a block; fails if that does not happen in time."""
    load = await load_of(worker)
    for _ in range(int(timeout_s / 0.1)):
        if not (load.waiting or load.running or load.used_blocks):
            return load
        await asyncio.sleep(0.1)
        load = await load_of(worker)
    raise AssertionError(f"not idle after {timeout_s} s: {load}")
