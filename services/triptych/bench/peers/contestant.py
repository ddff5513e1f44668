"""Those who are compared, ready to be started: our whole stack in one type, or a peer in one type."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.bench.peers.peer import SHORT, Command, Launch, Peer
from triptych.ports import free_ports
from triptych.processes import ServiceSpec
from triptych.stack import StackSettings, plan_stack, takes_no_pictures

START_TIMEOUT_S = 900.0
"""vLLM compiles the model when it is first started."""
KV_CACHE_BYTES = 1 << 30
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
        body: Fields that every request has beside the usual ones.
    """

    name: str
    engine: str
    title: str
    access: str
    dtype: str
    conversions: Sequence[Command]
    services: Sequence[ServiceSpec]
    url: str
    body: Mapping[str, Any] = field(default_factory=dict)


OURS = "triptych"


def make_ours(model_dir: Path, dtype: str, settings: StackSettings, environments: Path) -> Contestant:
    """Returns our stack on free ports, gateway and all. Its other settings are those of `settings`.

    Its vision repository is written below `environments`, as what is converted for peers. No deadline shall turn a
    picture into a text-only answer, which would be quick: there is none that matters, and requests forbid it.
    """
    worker = settings.worker.model_copy(
        update={"model_dir": model_dir, "dtype": dtype, "kv_cache_bytes": KV_CACHE_BYTES}
    )
    triton = settings.triton
    conversions: tuple[Command, ...] = ()
    if not takes_no_pictures(model_dir):
        repository = environments / "converted" / OURS / model_dir.name
        triton = triton.model_copy(update={"model_repository": repository, "start_timeout_s": START_TIMEOUT_S})
        conversions = () if repository.is_dir() else tuple(_export(model_dir, repository))
    # Nobody else lowers resolution under load, so the comparison is without it.
    patient = dict.fromkeys(("encode_timeout_s", "prefill_timeout_s", "next_token_timeout_s"), START_TIMEOUT_S)
    router = settings.router.model_copy(update={"resolution_by_load": False, **patient})
    stack = StackSettings(triton, worker, router, settings.gateway).on_free_ports()
    return Contestant(
        name=f"{OURS}-{SHORT[dtype]}",
        engine=OURS,
        title="Triptych",
        access="gateway",
        dtype=dtype,
        conversions=conversions,
        services=plan_stack(stack),
        url=f"{stack.gateway_url}/v1",
        body={"triptych": {"ignore_eos": True, "degrade": False}},
    )


def _export(model_dir: Path, repository: Path) -> Sequence[Command]:
    part = f"{repository}.part"
    export = (sys.executable, "-m", "triptych.cli", "export", str(model_dir), "--repository", part)
    ours = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return (Command(export, ours), Command(("mv", part, str(repository))))


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
