"""Builds the C++ step engine in csrc/ with the system's compiler, once per source and flags.

It is plain C++20 behind a C interface: neither Python's nor torch's headers are needed, and torch's version does not
matter. `triptych kernels` builds it ahead of time, and so does this file run as a program with a folder's name.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
# What a file is compiled for, beyond the target's minimum. The processor is asked at run time which one to use.
_X86_FLAGS: dict[str, tuple[str, ...]] = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "isa_amx.cpp": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


class KernelsUnavailable(RuntimeError):
    """The C++ engine cannot be used here; the message says why."""


def build_folder() -> Path:
    """Where built libraries are kept: $TRIPTYCH_KERNELS_DIR, or a folder in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TRIPTYCH_KERNELS_DIR") or cache_home / "triptych" / "kernels")


def build(folder: Path, *, emulate: bool = False) -> Path:
    """Builds the library in `folder` unless it is there, and returns its path.

    The name has a hash of sources and flags, so that an old one is never used, and a machine without a compiler can use
    one built elsewhere. With `emulate`, the AVX-512 BF16 and AMX kernels run on any processor with AVX-512, and so do
    those of other architectures: slowly, for tests. Raises KernelsUnavailable.
    """
    extra = ("-DTRIPTYCH_EMULATE",) if emulate else ()
    files = sorted(SOURCES.glob("*.cpp"))
    left_out = _X86_FLAGS.keys() if platform.machine() != "x86_64" else set() if emulate else {"isa_baseline.cpp"}
    files = [file for file in files if file.name not in left_out]
    digest = hashlib.sha256(repr((_FLAGS, _X86_FLAGS, extra)).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    library = folder / f"triptych-kernels-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler (g++, clang++ or $CXX) was found")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, extra, files, library)
    except OSError as error:
        raise KernelsUnavailable(f"{folder} cannot be written: {error}") from error


def _compile(compiler: str, extra: Sequence[str], files: Sequence[Path], library: Path) -> Path:
    folder = library.parent
    with tempfile.TemporaryDirectory(dir=folder) as objects:

        def compile_file(file: Path) -> str:
            target = f"{objects}/{file.stem}.o"
            _run([compiler, *_FLAGS, *extra, *_X86_FLAGS.get(file.name, ()), "-c", str(file), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            targets = list(pool.map(compile_file, files))
        linked = Path(objects) / library.name
        _run([compiler, "-shared", "-pthread", *targets, "-o", str(linked)])
        linked.replace(library)  # Atomic: another process may build the same one.
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelsUnavailable(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
