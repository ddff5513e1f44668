"""What it takes to compare ourselves with another engine: how to install it, feed it a checkpoint, and start it."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

DTYPES = ("bfloat16", "float16", "float32")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

SHIM = Path(__file__).parent / "shim" / "server.py"
"""An OpenAI server for engines that have none; runs in their environments, without this package."""


# OMP_WAIT_POLICY is set for our own engine when it is imported; a peer chooses its own.
_OURS = ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run: arguments, and variables beside this process's own."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment. Our own packages and settings stay out of it: the peer has its own."""
        kept = {k: v for k, v in os.environ.items() if k not in _OURS}
        return {**kept, "HF_HUB_OFFLINE": "1", **self.variables}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a peer is started for.

    Attributes:
        environment: Its virtual environment.
        model_dir: Hugging Face checkpoint folder, or what `prepare` made of it.
        converted: Where `prepare` may write; nobody else does.
        dtype: One of DTYPES.
        port: Where to serve, on loopback.
        threads: Threads that compute.
    """

    environment: Path
    model_dir: Path
    converted: Path
    dtype: str
    port: int
    threads: int

    @property
    def name(self) -> str:
        """What the model is called in requests."""
        return self.model_dir.name

    def python(self, *argv: str | Path, **variables: str) -> Command:
        """Returns a command of the environment's Python."""
        return Command((str(self.environment / "bin" / "python"), *map(str, argv)), variables)

    def shim(self, engine: str, *argv: str | Path, **variables: str) -> Command:
        """Returns the command that serves one of the engines in `shim/`."""
        common = ("--engine", engine, "--name", self.name, "--port", str(self.port), "--threads", str(self.threads))
        return self.python(SHIM, *common, *argv, **variables)


class Peer(Protocol):
    """An engine to compare with. Everything here is a pure function of its arguments."""

    name: str
    """How the command line calls it."""

    title: str
    """How tables call it."""

    access: str
    """How the client reaches it: a server of its own, or our shim around it."""

    requirements: tuple[str, ...]
    """What pip installs, versions pinned; the first is the engine."""

    dtypes: tuple[str, ...]
    """Types it can compute in."""

    def install(self, environment: Path) -> Sequence[Command]:
        """Returns what is left to do once pip has installed the requirements."""

    def prepare(self, launch: Launch) -> Sequence[Command]:
        """Returns the conversions of `launch.model_dir` that are still missing in `launch.converted`."""

    def serve(self, launch: Launch) -> Command:
        """Returns the server: OpenAI's chat completions and models below `/v1`, the settings as its authors advise."""


def create_environment(peer: Peer, environment: Path) -> list[Command]:
    """Returns the commands that make a peer's environment, in order."""
    pip = str(environment / "bin" / "pip")
    return [
        Command((sys.executable, "-m", "venv", str(environment))),
        Command((pip, "install", "--quiet", *peer.requirements)),
        *peer.install(environment),
    ]
