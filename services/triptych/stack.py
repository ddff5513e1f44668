"""The whole system on one machine: Triton, worker, router and gateway as child processes that live and die together."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from triptych.config import GatewaySettings, RouterSettings, TritonSettings, WorkerSettings
from triptych.errors import Unavailable
from triptych.http_health import answers_ok
from triptych.ports import check_ports, free_ports, reachable
from triptych.processes import LogSink, ManagedProcess, ServiceSpec
from triptych.rpc.health import is_serving

POLL_INTERVAL_S = 0.1

ReadySink = Callable[[str, float], None]
"""Called with a service's name and the seconds it took to get ready."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Settings of the services, made to fit each other; without `gateway`, none is started."""

    triton: TritonSettings
    worker: WorkerSettings
    router: RouterSettings
    gateway: GatewaySettings | None = None

    @classmethod
    def from_environment(cls) -> "StackSettings":
        """Reads TRIPTYCH_* variables; addresses at which services look for each other follow their ports."""
        return cls(TritonSettings(), WorkerSettings(), RouterSettings(), GatewaySettings())._connected()

    def on_free_ports(self) -> "StackSettings":
        """Returns the same settings on ports that nobody uses now, so that a running stack is not disturbed."""
        ports = free_ports(8)
        triton = self.triton.model_copy(update={"grpc_port": ports[0], "http_port": ports[1], "metrics_port": ports[2]})
        metrics = None if self.worker.metrics_port is None else ports[7]
        worker = self.worker.model_copy(update={"port": ports[3], "metrics_port": metrics})
        metrics = None if self.router.metrics_port is None else ports[6]
        router = self.router.model_copy(update={"port": ports[4], "metrics_port": metrics})
        gateway = self.gateway and self.gateway.model_copy(update={"port": ports[5]})
        return StackSettings(triton, worker, router, gateway)._connected()

    def without_gateway(self) -> "StackSettings":
        """Returns the same settings for gRPC only."""
        return replace(self, gateway=None)

    @property
    def router_address(self) -> str:
        """Where gRPC clients connect."""
        return f"{reachable(self.router.host)}:{self.router.port}"

    @property
    def gateway_url(self) -> str | None:
        """Where browsers and OpenAI clients connect."""
        return f"http://{reachable(self.gateway.host)}:{self.gateway.port}" if self.gateway else None

    def _connected(self) -> "StackSettings":
        triton = f"{reachable(self.triton.host)}:{self.triton.grpc_port}"
        worker = f"{reachable(self.worker.host)}:{self.worker.port}"
        metrics = f"{reachable(self.triton.host)}:{self.triton.metrics_port}"
        router = self.router.model_copy(update={"triton": triton, "triton_metrics": metrics, "worker": worker})
        gateway = self.gateway and self.gateway.model_copy(update={"router": self.router_address, "worker": worker})
        return StackSettings(self.triton, self.worker, router, gateway)


class Stack:
    """Children started together; `start` returns when all are ready, `wait` when one has died."""

    def __init__(self, specs: Sequence[ServiceSpec], sink: LogSink) -> None:
        self._processes = [ManagedProcess(spec, sink) for spec in specs]

    async def start(self, on_ready: ReadySink = lambda name, seconds: None) -> None:
        """Starts every service and waits for its health.

        Raises Unavailable with the service's name and its last log lines when one ends or is not ready in time; the
        caller still calls `stop`.
        """
        for process in self._processes:
            await process.start()
        async with asyncio.TaskGroup() as group:
            for process in self._processes:
                group.create_task(_wait_ready(process, on_ready))

    async def wait(self) -> ManagedProcess:
        """Returns the first service that ends."""
        waits = {asyncio.create_task(process.wait()): process for process in self._processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for task in waits:
                task.cancel()

    def pid_of(self, name: str) -> int:
        """Returns the process id of a started service. Raises KeyError for an unknown name."""
        return {process.spec.name: process for process in self._processes}[name].pid

    def pause(self) -> None:
        """Stops the clock of all, so that they cost nothing until `resume`."""
        for process in self._processes:
            process.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets all go on; does nothing to those that were not paused."""
        for process in self._processes:
            process.signal_group(signal.SIGCONT)

    async def stop(self) -> None:
        """Stops all, the ones that others depend on last."""
        for process in reversed(self._processes):
            await process.stop()


def plan_stack(settings: StackSettings) -> list[ServiceSpec]:
    """Returns how to start the services; a text-only checkpoint needs no Triton."""
    triton, worker, router = settings.triton, settings.worker, settings.router
    plan = (
        []
        if takes_no_pictures(worker.model_dir)
        else [
            _plan("triton", triton, f"{reachable(triton.host)}:{triton.grpc_port}", triton.start_timeout_s),
        ]
    )
    plan += [
        _plan("worker", worker, f"{reachable(worker.host)}:{worker.port}"),
        _plan("router", router, settings.router_address),
    ]
    if settings.gateway is not None:
        plan.append(_plan("gateway", settings.gateway, f"{settings.gateway_url}/ready"))
    return plan


def check_stack_ports(settings: StackSettings) -> None:
    """Raises Unavailable (PORT_TAKEN) naming the port and its knob when a service could not listen."""
    triton, gateway = settings.triton, settings.gateway
    if not takes_no_pictures(settings.worker.model_dir):
        check_ports(triton.host, triton, "grpc_port", "http_port", "metrics_port")
    for service in (settings.worker, settings.router):
        metrics = () if service.metrics_port is None else ("metrics_port",)
        check_ports(service.host, service, "port", *metrics)
    if gateway is not None:
        check_ports(gateway.host, gateway, "port")


def takes_no_pictures(model_dir: Path) -> bool:
    """Tells whether a folder holds a text-only checkpoint; of what is wrong with it, the worker will tell."""
    try:
        return "vision_config" not in json.loads((model_dir / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


@asynccontextmanager
async def running_stack(
    settings: StackSettings, sink: LogSink, on_ready: ReadySink = lambda name, seconds: None
) -> AsyncIterator[Stack]:
    """Yields a stack that is ready, and leaves nothing running behind.

    Raises Unavailable when a port is taken or a service does not get ready.
    """
    check_stack_ports(settings)
    stack = Stack(plan_stack(settings), sink)
    try:
        try:
            await stack.start(on_ready)
        except* Unavailable as group:
            raise group.exceptions[0] from None
        yield stack
    finally:
        await asyncio.shield(stack.stop())


async def _wait_ready(process: ManagedProcess, on_ready: ReadySink) -> None:
    spec = process.spec
    started = time.monotonic()
    while not await _is_ready(spec.address):
        waited = time.monotonic() - started
        if process.exit_code is not None:
            await asyncio.sleep(POLL_INTERVAL_S)  # Lets its last words arrive.
            raise _failed(process, f"ended with exit code {process.exit_code} before it was ready")
        if waited > spec.start_timeout_s:
            raise _failed(process, f"was not ready after {spec.start_timeout_s:g} s")
        await asyncio.sleep(POLL_INTERVAL_S)
    on_ready(spec.name, time.monotonic() - started)


async def _is_ready(address: str) -> bool:
    return await (answers_ok(address) if address.startswith("http://") else is_serving(address))


def _failed(process: ManagedProcess, what: str) -> Unavailable:
    lines = "\n".join(f"  {line}" for line in process.last_lines)
    return Unavailable(f"{process.spec.name} {what}; its last lines:\n{lines}", reason="START_FAILED")


def _plan(name: str, settings: BaseSettings, address: str, start_timeout_s: float = 300.0) -> ServiceSpec:
    argv = (sys.executable, "-m", "triptych.cli", "serve", name)
    return ServiceSpec(name, argv, _environment(settings), address, start_timeout_s)


def _environment(settings: BaseSettings) -> Mapping[str, str]:
    """Returns this process's environment with every knob of `settings` in it."""
    prefix = settings.model_config.get("env_prefix", "")
    values = {f"{prefix}{name}".upper(): value for name, value in settings if value is not None}
    return {**os.environ, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
