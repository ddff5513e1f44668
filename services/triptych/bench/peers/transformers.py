"""transformers' `generate`, behind our shim: requests that wait together become one static batch."""

from collections.abc import Sequence
from pathlib import Path

from triptych.bench.peers.peer import Command, Launch


class Transformers:
    """What most people begin with."""

    name = "transformers"
    title = "transformers 5.24"
    access = "our shim"
    requirements: tuple[str, ...] = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "pillow>=11.3")
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def install(self, environment: Path) -> Sequence[Command]:
        """Nothing."""
        return []

    def prepare(self, launch: Launch) -> Sequence[Command]:
        """Reads checkpoints as they are."""
        return []

    def serve(self, launch: Launch) -> Command:
        """Scaled dot-product attention, which is its default."""
        return launch.shim("transformers_engine", "--model", launch.model_dir, "--dtype", launch.dtype)
