"""`triptych status`: what runs, which versions, how busy, and why something does not serve."""

import asyncio
import json
import re
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.v1 import worker_pb2

TIMEOUT_S = 3.0

_VERSIONED = re.compile(r".+_v[0-9]+")
"""The ensembles that `triptych export` writes, one for each version."""

# A proxy from the environment must never come between services.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(slots=True)
class Service:
    """One service as it is now.

    Attributes:
        name: `gateway`, `router`, `worker` or `triton`.
        address: Where it was asked.
        serving: Whether it says that it serves.
        version: What it runs, in its own words; empty when it does not say.
        problem: Why it does not serve; empty when it does.
        facts: What else it says: load, models, cache.
    """

    name: str
    address: str
    serving: bool = False
    version: str = ""
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def status(
    router: Annotated[
        str | None, typer.Option("--address", envvar="TRIPTYCH_ADDRESS", help="the router's host:port")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="the worker's host:port")] = None,
    triton: Annotated[str | None, typer.Option(help="Triton's host:http_port")] = None,
    gateway: Annotated[str | None, typer.Option(help="the gateway's URL; empty: there is none")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Shows which services are up, with versions, load and cache; exits 1 unless all of them serve."""
    from rich.console import Console

    from triptych.stack import StackSettings

    settings = StackSettings.from_environment()
    triton_host = "127.0.0.1" if settings.triton.host in ("", "0.0.0.0") else settings.triton.host
    services = asyncio.run(
        look(
            router or settings.router_address,
            worker or settings.router.worker,
            triton or f"{triton_host}:{settings.triton.http_port}",
            settings.gateway_url if gateway is None else gateway or None,
        )
    )
    serving = all(service.serving for service in services)
    if as_json:
        print(json.dumps({"serving": serving, "services": [asdict(service) for service in services]}))
    else:
        Console().print(table_of(services))
    sys.exit(0 if serving else 1)


async def look(router: str, worker: str, triton: str, gateway: str | None) -> list[Service]:
    """Asks all services at once and returns their answers, each within TIMEOUT_S or so; never raises."""
    probes = [_router(router), _worker(worker), asyncio.to_thread(_triton, triton)]
    if gateway is not None:
        probes.insert(0, asyncio.to_thread(_gateway, gateway))
    return list(await asyncio.gather(*probes))


def table_of(services: list[Service]) -> "Table":
    """Returns a row per service."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for heading in ("service", "state", "version", "now"):
        table.add_column(heading, overflow="fold")
    for service in services:
        facts = [f"{name.replace('_', ' ')} {_in_words(value)}" for name, value in service.facts.items()]
        state = "[green]serving[/]" if service.serving else "[bold red]not serving[/]"
        now = ", ".join(facts) if service.serving else "; ".join(filter(None, [service.problem, *facts]))
        table.add_row(f"{service.name}\n[dim]{escape(service.address)}[/]", state, escape(service.version), escape(now))
    return table


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(inner)}" for name, inner in value.items())
    return f"{value:.0%}" if isinstance(value, float) else str(value)


async def _router(address: str) -> Service:
    from triptych.client import AsyncClient
    from triptych.errors import TriptychError
    from triptych.rpc.health import is_serving

    service = Service("router", address)
    try:
        async with AsyncClient(address) as client:
            model = await client.model(TIMEOUT_S)
    except TriptychError as error:
        service.problem = error.message
        return service
    service.serving = await is_serving(address, TIMEOUT_S)
    service.problem = "" if service.serving else "it is not ready"
    service.version = f"encoder {model.encoder_version}, model {model.name}"
    service.facts = {"most_images": model.max_images}
    return service


async def _worker(address: str) -> Service:
    import grpc

    from triptych.rpc.channel import open_channel
    from triptych.rpc.health import answers_serving
    from triptych.rpc.status import from_rpc_error
    from triptych.v1 import worker_pb2, worker_pb2_grpc

    service = Service("worker", address)
    async with open_channel(address) as channel:
        try:
            call = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(
                worker_pb2.WatchLoadRequest(), timeout=TIMEOUT_S
            )
            async for load in call:
                service.version = f"{load.model.name} {load.model.fingerprint[:12]}"
                service.facts = _load_facts(load)
                break
            call.cancel()
        except grpc.aio.AioRpcError as error:
            service.problem = from_rpc_error(error).message
            return service
        service.serving = await answers_serving(channel, TIMEOUT_S)
    service.problem = "" if service.serving else "its engine makes no progress"
    return service


def _load_facts(load: "worker_pb2.WorkerLoad") -> dict[str, Any]:
    return {
        "waiting": load.waiting,
        "running": load.running,
        "kv_blocks": {"used": load.used_blocks, "cached": load.cached_blocks, "total": load.total_blocks},
    }


def _triton(address: str) -> Service:
    from triptych.triton.readiness import broken_versions, is_ready

    service = Service("triton", address)
    try:
        about = _fetch_json(f"http://{address}/v2")
        models = _fetch_json(f"http://{address}/v2/repository/index", b"{}")
    except (OSError, ValueError) as error:
        service.problem = _reason(error)
        return service
    service.version = f"{about.get('name', 'triton')} {about.get('version', '')}".strip()
    ready = [model for model in models if model.get("state") == "READY"]
    service.facts = {"models": {model["name"]: f"v{model.get('version', '?')}" for model in ready}}
    broken = broken_versions(address, TIMEOUT_S / 2)
    if broken:
        service.facts["broken"] = broken
    # A version that cannot be loaded makes Triton as a whole not ready, while the one before goes on serving.
    service.serving = is_ready(address) or any(_VERSIONED.fullmatch(model["name"]) for model in ready)
    service.problem = "" if service.serving else "not all of its models are ready"
    return service


def _gateway(url: str) -> Service:
    service = Service("gateway", url.rstrip("/"))
    try:
        with _opener.open(f"{service.address}/ready", timeout=TIMEOUT_S):
            service.serving = True
        with _opener.open(f"{service.address}/metrics", timeout=TIMEOUT_S) as response:
            service.facts = _gateway_facts(response.read().decode("utf-8", "replace"))
        service.version = str(_fetch_json(f"{service.address}/openapi.json")["info"]["version"])
    except (OSError, ValueError, KeyError) as error:
        service.problem = "" if service.serving else _reason(error)
    return service


def _gateway_facts(metrics: str) -> dict[str, Any]:
    """Reads the few metrics that tell a person something; a share is a float, a count an int."""
    values: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("mm_"):
            key = name.partition("{")[0]
            values[key] = values.get(key, 0.0) + float(value.split()[0])
    prompt, cached = values.get("mm_prompt_tokens_total", 0.0), values.get("mm_cached_tokens_total", 0.0)
    facts: dict[str, Any] = {"in_flight": int(values.get("mm_http_requests_in_flight", 0))}
    if prompt:
        facts["prompt_tokens_from_cache"] = cached / prompt
    return facts


def _fetch_json(url: str, body: bytes | None = None) -> Any:
    with _opener.open(urllib.request.Request(url, data=body), timeout=TIMEOUT_S) as response:
        return json.load(response)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return f"nobody answers ({error.reason})"
    return f"{type(error).__name__}: {error}"
