"""Tensors survive the message, inline and shared; what does not fit together is refused."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triptych.errors import InvalidRequest
from triptych.tensors import Array, from_proto, shared_proto, to_proto
from triptych.v1 import tensor_pb2

DTYPES = ("<f4", "<f2", "<u2", "<i8", "<i4", "u1")

arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(arrays)
def test_an_inline_tensor_comes_back_equal(array: Array) -> None:
    got = from_proto(to_proto(array))
    assert got.shape == array.shape and got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()


def test_a_shared_tensor_comes_back_equal_and_its_memory_is_gone_afterwards() -> None:
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    with shared_proto(array) as tensor:
        np.testing.assert_array_equal(from_proto(tensor), array)
        name = tensor.shared_memory.name
        assert Path("/dev/shm", name).exists()
    assert not Path("/dev/shm", name).exists()
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        from_proto(tensor)


def test_a_tensor_that_finds_no_room_in_shared_memory_is_inline(
    monkeypatch: pytest.MonkeyPatch, regions: Callable[[], set[str]]
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    array = np.arange(6, dtype=np.float32)
    with shared_proto(array) as tensor:
        assert tensor.WhichOneof("payload") == "inline"
        np.testing.assert_array_equal(from_proto(tensor), array)
    assert not regions()


def test_shared_memory_is_released_when_the_sender_fails() -> None:
    with pytest.raises(RuntimeError), shared_proto(np.zeros(8, np.float32)) as tensor:
        raise RuntimeError
    assert not Path("/dev/shm", tensor.shared_memory.name).exists()


def test_a_transposed_array_is_sent_row_major() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    np.testing.assert_array_equal(from_proto(to_proto(array)), array)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (tensor_pb2.Tensor(shape=[1], inline=b"abcd"), "data_type"),
        (tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], inline=b"abcd"), "needs 8 bytes"),
        (tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[-1], inline=b"abcd"), "negative"),
        (tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1]), "no payload"),
        (
            tensor_pb2.Tensor(
                data_type=tensor_pb2.DATA_TYPE_UINT8,
                shape=[4],
                shared_memory=tensor_pb2.SharedMemory(name="../etc/passwd", size_bytes=4),
            ),
            "bad name",
        ),
    ],
)
def test_a_malformed_tensor_is_refused_with_the_reason(tensor: tensor_pb2.Tensor, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        from_proto(tensor)
    assert caught.value.reason == "TENSOR_MALFORMED"


def test_a_region_beyond_its_object_is_refused() -> None:
    with shared_proto(np.zeros(4, np.uint8)) as tensor:
        tensor.shared_memory.size_bytes = 1 << 20
        tensor.shape[0] = 1 << 20
        with pytest.raises(InvalidRequest, match="shorter"):
            from_proto(tensor)
