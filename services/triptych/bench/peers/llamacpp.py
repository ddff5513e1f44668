"""llama.cpp's own server, built for this machine from the source that the package llama-cpp-python carries."""

from collections.abc import Sequence
from pathlib import Path

from triptych.bench.peers.peer import SHORT, Command, Launch

PACKAGE = "llama-cpp-python==0.3.36"
SLOTS = 16
CONTEXT_PER_SLOT = 2048
_BUILD = """
set -euo pipefail
mkdir -p "$1/src" && cd "$1/src"
"$1/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python "$2"
tar xzf llama_cpp_python-*.tar.gz --strip-components 1
cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \\
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
cmake --build build --target llama-server --parallel
cp build/bin/llama-server "$1/bin/"
"""


class LlamaCpp:
    """The C++ server with continuous batching; the Python server of the same package answers one request at a time."""

    name = "llamacpp"
    title = "llama.cpp 0.5 server"
    access = "own server"
    requirements: tuple[str, ...] = ("torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "sentencepiece")
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def install(self, environment: Path) -> Sequence[Command]:
        """Needs cmake and a C++ compiler; takes some minutes."""
        return [Command(("bash", "-c", _BUILD, "build", str(environment), PACKAGE))]

    def prepare(self, launch: Launch) -> Sequence[Command]:
        """Converts to GGUF with llama.cpp's own script."""
        if (file := gguf_of(launch)).exists():
            return []
        script = launch.environment / "src" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
        return [
            launch.python(script, launch.model_dir, "--outtype", SHORT[launch.dtype], "--outfile", f"{file}.part"),
            Command(("mv", f"{file}.part", str(file))),
        ]

    def serve(self, launch: Launch) -> Command:
        """A slot for each of 16 streams; a prompt of 1,024 tokens is one batch."""
        return Command(
            (
                str(launch.environment / "bin" / "llama-server"),
                "--model", str(gguf_of(launch)), "--alias", launch.name,
                "--host", "127.0.0.1", "--port", str(launch.port), "--threads", str(launch.threads),
                "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT_PER_SLOT),
                "--batch-size", "2048", "--ubatch-size", "512", "--flash-attn", "on", "--jinja",
            )
        )  # fmt: skip


def gguf_of(launch: Launch) -> Path:
    """Returns where the converted weights are."""
    return launch.converted / f"{SHORT[launch.dtype]}.gguf"
