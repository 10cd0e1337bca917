"""NumPy arrays to `Tensor` messages and back: little-endian bytes in C order.

Types that NumPy lacks (bfloat16, float8) are unsigned integers of the same width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshrl.v1 import tensor_pb2 as pb
from meshrl.wire.errors import FieldViolation, MeshError, Reason
from meshrl.wire.values import Array


@dataclass(frozen=True)
class DType:
    """Its number on the wire, little-endian NumPy type and safetensors name."""

    name: str
    number: pb.DataType
    storage: np.dtype[np.generic]
    safetensors: str

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize


DTYPES: Mapping[str, DType] = {
    name: DType(name, number, np.dtype(storage), safetensors)
    for name, number, storage, safetensors in (
        ("bool", pb.DATA_TYPE_BOOL, "?", "BOOL"),
        ("uint8", pb.DATA_TYPE_UINT8, "u1", "U8"),
        ("int8", pb.DATA_TYPE_INT8, "i1", "I8"),
        ("int16", pb.DATA_TYPE_INT16, "<i2", "I16"),
        ("int32", pb.DATA_TYPE_INT32, "<i4", "I32"),
        ("int64", pb.DATA_TYPE_INT64, "<i8", "I64"),
        ("float16", pb.DATA_TYPE_FLOAT16, "<f2", "F16"),
        ("bfloat16", pb.DATA_TYPE_BFLOAT16, "<u2", "BF16"),
        ("float32", pb.DATA_TYPE_FLOAT32, "<f4", "F32"),
        ("float64", pb.DATA_TYPE_FLOAT64, "<f8", "F64"),
        ("float8_e4m3", pb.DATA_TYPE_FLOAT8_E4M3, "u1", "F8_E4M3"),
        ("float8_e5m2", pb.DATA_TYPE_FLOAT8_E5M2, "u1", "F8_E5M2"),
    )
}
_BY_NUMBER: Mapping[int, DType] = {dtype.number: dtype for dtype in DTYPES.values()}


def dtype_name(number: int) -> str | None:
    """None for an unknown number."""
    dtype = _BY_NUMBER.get(number)
    return None if dtype is None else dtype.name


def encode(array: Array, dtype: str | None = None) -> pb.Tensor:
    """bfloat16 and float8 need `dtype` and an array of unsigned integers. Raises ValueError for a type without a
    number on the wire, or of another width."""
    name = array.dtype.name if dtype is None else dtype
    kind = DTYPES.get(name)
    if kind is None:
        raise ValueError(f"a tensor of type {name} cannot be sent; use one of {', '.join(DTYPES)}")
    stored = array.dtype.newbyteorder("<")
    if stored != kind.storage:
        raise ValueError(f"type {name} is sent from an array of {kind.storage.name}, got one of {array.dtype.name}")
    return pb.Tensor(dtype=kind.number, shape=array.shape, data=array.astype(stored, copy=False).tobytes())


def decode(tensor: pb.Tensor, *, expect: str | None = None, ndim: int | None = None, field: str = "") -> Array:
    """A read-only view of the message's bytes. `field` names the tensor in errors. Raises INVALID_REQUEST for a
    wrong number of bytes, type or number of dimensions."""
    kind = _BY_NUMBER.get(tensor.dtype)
    if kind is None:
        raise _refuse(field, "dtype", f"element type {tensor.dtype} is not known here")
    if expect is not None and kind.name != expect:
        raise _refuse(field, "dtype", f"must be {expect}, got {kind.name}")
    shape = tuple(tensor.shape)
    if ndim is not None and len(shape) != ndim:
        raise _refuse(field, "shape", f"must have {ndim} dimensions, got {shape}")
    if any(length < 0 for length in shape):
        raise _refuse(field, "shape", f"lengths must not be negative, got {shape}")
    data = tensor.data
    num_bytes = math.prod(shape) * kind.itemsize
    if len(data) != num_bytes:
        raise _refuse(field, "data", f"{kind.name} of shape {shape} takes {num_bytes} bytes, got {len(data)}")
    if kind.name == "bool" and data and np.frombuffer(data, dtype=np.uint8).max() > 1:
        raise _refuse(field, "data", "a bool is 0 or 1")
    try:
        return np.frombuffer(data, dtype=kind.storage).reshape(shape)
    except ValueError as error:  # numpy limits the number and product of dimensions
        raise _refuse(field, "shape", f"shape {shape} is not possible: {error}") from error


def _refuse(field: str, part: str, description: str) -> MeshError:
    path = f"{field}.{part}" if field else part
    text = f"the tensor {field} cannot be read" if field else "the tensor cannot be read"
    return MeshError(Reason.INVALID_REQUEST, text, violations=[FieldViolation(path, description)])
