"""Tensors travel as raw little-endian bytes, and what does not add up is refused with its field."""

import numpy as np
import pytest

from meshrl.v1 import tensor_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.errors import MeshError, Reason


def test_bytes_are_little_endian_in_c_order():
    tensor = tensors.encode(np.array([[1, 2], [3, 4]], dtype=np.int16).T)
    assert tensor.data == b"\x01\x00\x03\x00\x02\x00\x04\x00"
    assert list(tensor.shape) == [2, 2]
    assert tensor.dtype == pb.DATA_TYPE_INT16


def test_big_endian_arrays_are_swapped():
    tensor = tensors.encode(np.array([1.5, -2.0], dtype=">f4"))
    np.testing.assert_array_equal(tensors.decode(tensor), np.array([1.5, -2.0], dtype=np.float32))


def test_decoded_arrays_are_read_only():
    array = tensors.decode(tensors.encode(np.arange(3, dtype=np.int32)))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_types_without_a_number_are_refused_when_sending():
    with pytest.raises(ValueError, match="complex128 cannot be sent"):
        tensors.encode(np.zeros(2, dtype=np.complex128))
    with pytest.raises(ValueError, match="bfloat16 is sent from an array of uint16, got one of float32"):
        tensors.encode(np.zeros(2, dtype=np.float32), "bfloat16")


@pytest.mark.parametrize(
    ("tensor", "field", "description"),
    [
        (pb.Tensor(shape=[1], data=b"\0"), "x.dtype", "element type 0 is not known here"),
        (pb.Tensor(dtype=99, shape=[1], data=b"\0"), "x.dtype", "element type 99 is not known here"),
        (
            pb.Tensor(dtype=pb.DATA_TYPE_INT32, shape=[2], data=b"\0"),
            "x.data",
            "int32 of shape (2,) takes 8 bytes, got 1",
        ),
        (
            pb.Tensor(dtype=pb.DATA_TYPE_INT8, shape=[-1], data=b""),
            "x.shape",
            "lengths must not be negative, got (-1,)",
        ),
        (pb.Tensor(dtype=pb.DATA_TYPE_BOOL, shape=[2], data=b"\1\2"), "x.data", "a bool is 0 or 1"),
    ],
)
def test_tensors_that_do_not_add_up_are_refused(tensor, field, description):
    with pytest.raises(MeshError) as refused:
        tensors.decode(tensor, field="x")
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert [(v.field, v.description) for v in refused.value.violations] == [(field, description)]


def test_huge_shapes_cost_nothing():
    huge = pb.Tensor(dtype=pb.DATA_TYPE_INT64, shape=[2**62, 2**62], data=b"")
    with pytest.raises(MeshError, match="takes"):
        tensors.decode(huge)


def test_more_dimensions_than_numpy_has_are_refused():
    deep = pb.Tensor(dtype=pb.DATA_TYPE_INT8, shape=[1] * 100, data=b"\0")
    with pytest.raises(MeshError, match="is not possible"):
        tensors.decode(deep)


def test_the_callers_expectation_is_checked():
    tensor = tensors.encode(np.zeros((2, 2), dtype=np.float64))
    with pytest.raises(MeshError, match="must be float32, got float64"):
        tensors.decode(tensor, expect="float32")
    with pytest.raises(MeshError, match="must have 1 dimensions"):
        tensors.decode(tensor, ndim=1)


def test_names_agree_with_the_contract():
    assert {dtype.number for dtype in tensors.DTYPES.values()} == set(pb.DataType.values()) - {0}
    assert all(tensors.dtype_name(dtype.number) == name for name, dtype in tensors.DTYPES.items())
    assert tensors.dtype_name(99) is None
