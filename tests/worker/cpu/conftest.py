"""The emulating build, for instruction sets that this machine lacks."""

import ctypes

import pytest

from triptych.worker.cpu import library as native
from triptych.worker.cpu.build import build, build_folder


@pytest.fixture(scope="session")
def emulating_library() -> ctypes.CDLL:
    """The library with AVX-512 BF16 and AMX in software, and with the portable kernels."""
    if native.best_isa() not in ("avx512", "avx512_bf16", "amx"):
        pytest.skip("needs AVX-512")
    return native.load(build(build_folder(), emulate=True))
