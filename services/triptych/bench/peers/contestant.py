"""Those who are compared, ready to be started: our whole stack in one type, or a peer in one type."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.bench.peers.peer import SHORT, Command, Launch, Peer
from triptych.ports import free_ports
from triptych.processes import ServiceSpec
from triptych.stack import StackSettings, plan_stack

START_TIMEOUT_S = 900.0
"""vLLM compiles the model when it is first started."""
KV_CACHE_BYTES = 2 << 30
"""What every engine gets for its KV cache."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine in one type.

    Attributes:
        name: Unique among those compared.
        engine: `triptych`, or a peer's name.
        title: How tables call the engine.
        access: How the client reaches it.
        dtype: Type of its arithmetic, as asked for.
        conversions: What must be run before the first start.
        services: Processes to start.
        url: Its OpenAI API, with `/v1`.
    """

    name: str
    engine: str
    title: str
    access: str
    dtype: str
    conversions: Sequence[Command]
    services: Sequence[ServiceSpec]
    url: str


OURS = "triptych"


def make_ours(model_dir: Path, dtype: str, settings: StackSettings) -> Contestant:
    """Returns our stack on free ports, gateway and all. Its other settings are those of `settings`."""
    worker = settings.worker.model_copy(
        update={"model_dir": model_dir, "dtype": dtype, "kv_cache_bytes": KV_CACHE_BYTES}
    )
    # Nobody else lowers resolution under load, so the comparison is without it.
    router = settings.router.model_copy(update={"resolution_by_load": False})
    stack = StackSettings(settings.triton, worker, router, settings.gateway).on_free_ports()
    services = plan_stack(stack)
    url = f"{stack.gateway_url}/v1"
    return Contestant(f"{OURS}-{SHORT[dtype]}", OURS, "Triptych", "gateway", dtype, (), services, url)


def make_peer(peer: Peer, dtype: str, model_dir: Path, environments: Path, threads: int | None = None) -> Contestant:
    """Returns a peer on a free port. `environments` holds a folder for each peer, and what was converted for it."""
    (port,) = free_ports(1)
    launch = Launch(
        environment=environments / peer.name,
        model_dir=model_dir,
        converted=environments / "converted" / peer.name / model_dir.name,
        dtype=dtype,
        port=port,
        threads=threads or len(os.sched_getaffinity(0)),
    )
    url = f"http://127.0.0.1:{port}/v1"
    command = peer.serve(launch)
    name = f"{peer.name}-{SHORT[dtype]}"
    service = ServiceSpec(name, command.argv, command.environment, f"{url}/models", START_TIMEOUT_S)
    launch.converted.mkdir(parents=True, exist_ok=True)
    return Contestant(name, peer.name, peer.title, peer.access, dtype, peer.prepare(launch), (service,), url)


def make_plain(model_dir: Path, folder: Path) -> Path:
    """Returns a folder of links to a checkpoint whose config.json says nothing of a quantization it no longer has.

    Checkpoints that transformers made of GGUF files still name one, which other engines believe.
    """
    plain = folder / model_dir.name
    plain.mkdir(parents=True, exist_ok=True)
    for part in model_dir.iterdir():
        link = plain / part.name
        if part.name == "config.json":
            config = json.loads(part.read_text("utf-8"))
            config.pop("quantization_config", None)
            link.write_text(json.dumps(config, indent=2), "utf-8")
        elif not link.exists():
            link.symlink_to(part.resolve())
    return plain
