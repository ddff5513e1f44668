"""The Tensor message to and from numpy, inline or through POSIX shared memory. bfloat16 travels as uint16 bits."""

import math
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.errors import InvalidRequest
from triptych.v1 import tensor_pb2

Array = npt.NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
}
_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def to_proto(array: Array) -> tensor_pb2.Tensor:
    """Returns an array as an inline tensor; uint16 arrays are taken as bfloat16 bits.

    Raises TypeError for types that the message cannot carry.
    """
    data_type = _type_of(array)
    return tensor_pb2.Tensor(data_type=data_type, shape=array.shape, inline=np.ascontiguousarray(array).tobytes())


def from_proto(tensor: tensor_pb2.Tensor) -> Array:
    """Returns a tensor's elements: a read-only view of the message when inline, a copy when shared.

    Raises InvalidRequest (TENSOR_MALFORMED) when type, shape and payload do not fit together or the shared memory
    cannot be read.
    """
    dtype = _DTYPES.get(tensor.data_type)
    if dtype is None:
        raise _malformed(f"data_type {tensor.data_type} is not supported")
    if any(side < 0 for side in tensor.shape):
        raise _malformed("a dimension is negative")
    size_bytes = math.prod(tensor.shape) * dtype.itemsize
    kind = tensor.WhichOneof("payload")
    if kind == "inline":
        data: bytes = tensor.inline
    elif kind == "shared_memory":
        data = _read_shared(tensor.shared_memory)
    else:
        raise _malformed("it has no payload")
    if len(data) != size_bytes:
        raise _malformed(f"shape {list(tensor.shape)} needs {size_bytes} bytes, the payload has {len(data)}")
    return np.frombuffer(data, dtype).reshape(tuple(tensor.shape))


def create_shared(size_bytes: int) -> shared_memory.SharedMemory:
    """Returns a new shared memory object whose pages are all there.

    Raises OSError when there is no room for them: writing to an object without pages would kill the process.
    """
    block = shared_memory.SharedMemory(create=True, size=max(1, size_bytes))
    try:
        descriptor = os.open(f"/dev/shm/{block.name.lstrip('/')}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, max(1, size_bytes))
        finally:
            os.close(descriptor)
    except BaseException:
        block.close()
        block.unlink()
        raise
    return block


@contextmanager
def shared_proto(array: Array) -> Iterator[tensor_pb2.Tensor]:
    """Puts an array into a new shared memory object and yields the tensor that names it; unlinks on exit, always.

    Where there is no room for one, the tensor is inline.
    """
    data_type = _type_of(array)
    try:
        block = create_shared(array.nbytes)
    except OSError:
        yield to_proto(array)
        return
    try:
        np.ndarray(array.shape, array.dtype, block.buf)[...] = array
        name = block.name.lstrip("/")
        region = tensor_pb2.SharedMemory(name=name, offset_bytes=0, size_bytes=array.nbytes)
        yield tensor_pb2.Tensor(data_type=data_type, shape=array.shape, shared_memory=region)
    finally:
        block.close()
        block.unlink()


def sent(array: Array, shared: ExitStack | None) -> tensor_pb2.Tensor:
    """Returns an array inline, or, when `shared` is given, in shared memory that lives until that stack closes."""
    return to_proto(array) if shared is None else shared.enter_context(shared_proto(array))


def _type_of(array: Array) -> tensor_pb2.DataType.ValueType:
    data_type = _TYPES.get(array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
    if data_type is None:
        raise TypeError(f"no tensor type for numpy {array.dtype}")
    return tensor_pb2.DataType.ValueType(data_type)


def _read_shared(region: tensor_pb2.SharedMemory) -> bytes:
    if not _SAFE_NAME.fullmatch(region.name) or region.offset_bytes < 0 or region.size_bytes <= 0:
        raise _malformed("its shared memory region has a bad name, offset or size")
    try:
        descriptor = os.open(f"/dev/shm/{region.name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _malformed(f"shared memory {region.name} cannot be opened: {error.strerror}") from None
    try:
        end = region.offset_bytes + region.size_bytes
        if os.fstat(descriptor).st_size < end:
            raise _malformed("its shared memory object is shorter than the region")
        with mmap.mmap(descriptor, end, prot=mmap.PROT_READ) as view:
            return view[region.offset_bytes : end]
    finally:
        os.close(descriptor)


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"malformed tensor: {why}", reason="TENSOR_MALFORMED")
