"""OpenVINO GenAI with continuous batching, behind our shim: its own OpenAI server is a container, not a package."""

from collections.abc import Sequence
from pathlib import Path

from triptych.bench.peers.peer import SHORT, Command, Launch
from triptych.stack import takes_no_pictures


class OpenVino:
    """`ContinuousBatchingPipeline`, exported by optimum-intel."""

    name = "openvino"
    title = "OpenVINO GenAI 2026.4"
    access = "our shim"
    requirements: tuple[str, ...] = (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "torch==2.13.0",
        "pillow>=11.3",
    )
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def install(self, environment: Path) -> Sequence[Command]:
        """As with vLLM: a torchvision for CUDA, which optimum brings along, keeps transformers from loading."""
        return [Command((str(environment / "bin" / "pip"), "uninstall", "--quiet", "--yes", "torchvision"))]

    def prepare(self, launch: Launch) -> Sequence[Command]:
        """Exports weights of 16 or 32 bits."""
        folder = exported(launch)
        if folder.exists():
            return []
        task = "text-generation-with-past" if takes_no_pictures(launch.model_dir) else "image-text-to-text"
        options = ("--model", str(launch.model_dir), "--task", task, "--weight-format", _weights(launch.dtype))
        tool = str(launch.environment / "bin" / "optimum-cli")
        return [
            Command((tool, "export", "openvino", *options, f"{folder}.part")),
            Command(("mv", f"{folder}.part", str(folder))),
        ]

    def serve(self, launch: Launch) -> Command:
        """The type is a hint that OpenVINO follows on processors of either kind."""
        return launch.shim("openvino_engine", "--model", exported(launch), "--dtype", SHORT[launch.dtype])


def exported(launch: Launch) -> Path:
    """Returns the folder of the exported model."""
    return launch.converted / _weights(launch.dtype)


def _weights(dtype: str) -> str:
    return "fp32" if dtype == "float32" else "fp16"
