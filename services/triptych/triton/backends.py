"""Prepares the backend directory of a tritonserver that has no ONNX Runtime backend of its own."""

import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from triptych.errors import Unavailable
from triptych.triton.install import STUB, Installation

OURS = Path(__file__).parent / "backends" / "onnxruntime"


def has_onnxruntime(installation: Installation) -> bool:
    """Tells whether the server brings the C++ backend, as NVIDIA's container does; then ours is not needed."""
    return (installation.backends / "onnxruntime" / "libtriton_onnxruntime.so").is_file()


def prepare_backends(installation: Installation, folder: Path) -> Path:
    """Returns the backend directory to run with.

    That is the server's own, untouched, if it serves ONNX. Else `folder`, filled with the server's backends, a stub
    for the running Python, and our onnxruntime backend. The Python backend is copied, not linked: Triton refuses a
    library whose real path lies outside the directory.
    """
    if has_onnxruntime(installation):
        return installation.backends
    if not (installation.backends / "python" / "libtriton_python.so").is_file():
        raise Unavailable(
            f"{installation.backends} has neither an onnxruntime nor a python backend: {installation.server} cannot "
            "serve ONNX models; use NVIDIA's -py3 container or the nvidia-pytriton wheel",
            reason="TRITON_BACKEND_MISSING",
        )
    stub = find_stub(installation)
    folder.mkdir(parents=True, exist_ok=True)
    for backend in installation.backends.iterdir():
        if backend.name not in ("python", "onnxruntime") and not (folder / backend.name).exists():
            (folder / backend.name).symlink_to(backend)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installation.backends / "python", folder / "python", ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(OURS, folder / "onnxruntime", ignore=ignored, dirs_exist_ok=True)
    shutil.copy2(stub, folder / "python" / STUB)
    return folder


def find_stub(installation: Installation) -> Path:
    """Returns the Python backend's stub for the running Python; raises Unavailable naming the versions there are."""
    version = sysconfig.get_python_version()
    if installation.stubs is not None:
        stub = installation.stubs / version / STUB
        versions = sorted(entry.name for entry in installation.stubs.iterdir()) if installation.stubs.is_dir() else []
    else:
        stub = installation.backends / "python" / STUB
        versions = []
    if not stub.is_file():
        raise Unavailable(
            f"Triton's Python backend has no stub for Python {version} ({stub} does not exist; "
            f"there are {', '.join(versions) or 'none'})",
            reason="TRITON_BACKEND_MISSING",
        )
    return stub


def check_stub(stub: Path, environment: Mapping[str, str]) -> None:
    """Raises Unavailable, with the loader's words, when the stub cannot start.

    Triton would wait for such a stub without end. Called with no arguments, a sound one says so and exits with 1.
    """
    try:
        run = subprocess.run([stub], env=environment, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Triton's Python stub {stub} cannot run: {error}", reason="TRITON_START_FAILED") from error
    if run.returncode not in (0, 1):
        words = (run.stderr or run.stdout).strip() or f"exit status {run.returncode}"
        raise Unavailable(f"Triton's Python stub cannot start: {words}", reason="TRITON_START_FAILED")
