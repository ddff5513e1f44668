"""The C interface of the step engine, as csrc/bindings.cpp has it."""

import ctypes
import platform
from functools import cache
from pathlib import Path

from torch import Tensor

from triptych.worker.cpu.build import KernelsUnavailable, build, build_folder

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets with kernels of their own, weakest first."""


class Shape(ctypes.Structure):
    """A decoder's shape."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        ("vocabulary", ctypes.c_int32),
        ("positions", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    ]


class LayerTensors(ctypes.Structure):
    """Addresses of one layer's weights, float32."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("attention_norm", "qkv", "qkv_bias", "output", "mlp_norm", "gate_up", "down")
    ]


class Segment(ctypes.Structure):
    """Keys that a sequence's only row attends to beside those of its block table."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("sequence", "cache", "tokens", "table")),
        ("origins", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class StepInput(ctypes.Structure):
    """Addresses of what a step is given."""

    _fields_ = [
        ("embedded", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("sequences", ctypes.c_void_p),
        ("sequence_count", ctypes.c_int32),
        ("tables", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int32),
    ]


class StepOutput(ctypes.Structure):
    """Addresses where a step writes, null for what nobody wants."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("logits", "greedy", "finite")]


def load(path: Path) -> ctypes.CDLL:
    """Loads a built library and declares its functions. Raises KernelsUnavailable."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, *arguments in (
        ("last_error", ctypes.c_char_p),
        ("best_isa", number),
        ("create", pointer, pointer, number, number, number),
        ("destroy", None, pointer),
        ("add_layer", number, pointer, pointer),
        ("set_head", number, pointer, pointer, pointer),
        ("set_rotary", number, pointer, pointer, pointer),
        ("add_cache", number, pointer, pointer, pointer, number, number),
        ("set_basis", number, pointer, pointer, pointer, pointer, pointer, number),
        ("weight_bytes", ctypes.c_size_t, pointer),
        ("isa", number, pointer),
        ("start_step", number, pointer, pointer, pointer),
        ("await_step", None, pointer),
        ("read_seconds", ctypes.c_double, pointer, ctypes.c_size_t, number),
    ):
        function = getattr(library, f"triptych_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def library() -> ctypes.CDLL:
    """Builds and loads the library, once. The first call ever takes half a minute. Raises KernelsUnavailable."""
    if platform.system() != "Linux":
        raise KernelsUnavailable(f"{platform.system()} is not supported")
    loaded = load(build(build_folder()))
    if platform.machine() == "x86_64" and loaded.triptych_best_isa() == ISAS.index("baseline"):
        raise KernelsUnavailable("this processor has no AVX2")
    return loaded


def best_isa() -> str:
    """Returns the best instruction set of this processor that the engine has kernels for."""
    return ISAS[library().triptych_best_isa()]


def supports(isa: str) -> bool:
    """Tells whether this processor has an instruction set."""
    return ISAS.index(isa) <= int(library().triptych_best_isa())


def read_seconds(data: Tensor, threads: int) -> float:
    """Returns how long `threads` threads take to read a tensor once, in order: the limit of a decode step."""
    return float(library().triptych_read_seconds(data.data_ptr(), data.numel() * data.itemsize, threads))
