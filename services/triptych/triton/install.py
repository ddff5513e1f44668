"""Finds a tritonserver: the configured one, the one on PATH, or the one inside the nvidia-pytriton wheel."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import Unavailable

CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")
"""Where NVIDIA's container keeps them, and tritonserver's own default."""

STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver and what belongs to it.

    Attributes:
        server: The executable.
        backends: Its backend directory.
        stubs: Folder of Python backend stubs by Python version (the wheel's layout), or None.
        libraries: Folders its libraries are in, for LD_LIBRARY_PATH; empty where the system knows them.
    """

    server: Path
    backends: Path
    stubs: Path | None = None
    libraries: tuple[Path, ...] = ()


def find_installation(configured: Path | None = None, path: str | None = None) -> Installation:
    """Returns the tritonserver to run: `configured`, else the first on `path` (default: PATH), else the wheel's.

    Touches and imports nothing. Raises Unavailable (TRITON_NOT_FOUND) that says how to get one.
    """
    wheel = find_wheel()
    if configured is not None:
        if not (configured.is_file() and os.access(configured, os.X_OK)):
            raise Unavailable(
                f"TRIPTYCH_TRITON_TRITONSERVER is {configured}, which is not an executable file; "
                "correct it, or unset it to use the one on PATH or in the nvidia-pytriton wheel",
                reason="TRITON_NOT_FOUND",
            )
        return describe(configured, wheel)
    on_path = shutil.which("tritonserver", path=path)
    if on_path is not None:
        return describe(Path(on_path), wheel)
    if wheel is not None:
        return wheel
    raise Unavailable(
        "no tritonserver: none on PATH and no nvidia-pytriton in this Python environment. Run `make venv` "
        "(or install triptych[triton]), use NVIDIA's container, or set TRIPTYCH_TRITON_TRITONSERVER",
        reason="TRITON_NOT_FOUND",
    )


def find_wheel() -> Installation | None:
    """Returns the tritonserver inside the nvidia-pytriton wheel, or None; pytriton itself is not imported."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "tritonserver"
        server = root / "bin" / "tritonserver"
        if server.is_file():
            libraries = Path(location).parent / "nvidia_pytriton.libs"
            return Installation(server, root / "backends", root / "python_backend_stubs", (libraries,))
    return None


def describe(server: Path, wheel: Installation | None) -> Installation:
    """Returns the installation an executable belongs to. Raises Unavailable when it has no backends anywhere."""
    real = server.resolve()
    if wheel is not None and real == wheel.server.resolve():
        return wheel
    for backends in (real.parent.parent / "backends", CONTAINER_BACKENDS):
        if backends.is_dir():
            return Installation(server, backends)
    if wheel is not None:  # A wrapper script around the wheel's server, say.
        return Installation(server, wheel.backends, wheel.stubs, wheel.libraries)
    raise Unavailable(
        f"{server} has no backend directory: neither {real.parent.parent / 'backends'} nor {CONTAINER_BACKENDS} exists",
        reason="TRITON_NOT_FOUND",
    )


def server_environment(installation: Installation, base: Mapping[str, str]) -> dict[str, str]:
    """Returns `base` changed so that the server finds its libraries and its Python stubs find this environment.

    Without the libraries' folder a stub dies while it is being loaded and Triton waits for it for ever.
    """
    libraries = [str(folder) for folder in installation.libraries]
    library_folder = sysconfig.get_config_var("LIBDIR")
    if library_folder and any(Path(library_folder).glob(f"libpython{sysconfig.get_python_version()}.so*")):
        libraries.append(library_folder)
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    environment = dict(base)
    for name, entries in (
        ("LD_LIBRARY_PATH", libraries),
        ("PATH", [str(Path(sys.prefix) / "bin")]),
        ("PYTHONPATH", packages),
    ):
        inherited = environment.get(name)
        environment[name] = os.pathsep.join([*entries, *([inherited] if inherited else [])])
    return environment
