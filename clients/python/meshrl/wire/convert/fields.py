"""Reads tensors of messages and collects what is wrong with them, so that one answer names every bad field."""

from __future__ import annotations

import numpy as np

from meshrl.v1 import tensor_pb2
from meshrl.wire import tensors
from meshrl.wire.errors import FieldViolation, MeshError, invalid
from meshrl.wire.types.routes import Routes
from meshrl.wire.values import Array


class FieldReader:
    """Decodes tensors and checks conditions; `done` raises for everything that was wrong."""

    def __init__(self, what: str, prefix: str = "") -> None:
        self._what = what
        self._prefix = f"{prefix}." if prefix else ""
        self.violations: list[FieldViolation] = []

    def vector(self, tensor: tensor_pb2.Tensor, field: str, dtype: str, ndim: int = 1) -> Array:
        """Returns a tensor of `dtype` with `ndim` dimensions; an empty one stands in for one that cannot be read."""
        try:
            return tensors.decode(tensor, expect=dtype, ndim=ndim, field=self._prefix + field)
        except MeshError as error:  # collected: the caller gets all violations in one answer
            self.violations.extend(error.violations)
            return np.zeros((0,) * ndim, dtype=tensors.DTYPES[dtype].storage)

    def routes(self, tensor: tensor_pb2.Tensor, field: str) -> Routes:
        """Returns routes of experts (T, L, K), of one of their two types."""
        narrow = tensors.dtype_name(tensor.dtype) != "int16"
        return self.vector(tensor, field, "uint8" if narrow else "int16", ndim=3)

    def check(self, holds: bool, field: str, description: str) -> None:
        """Records a violation of `field` unless `holds`."""
        if not holds:
            self.violations.append(FieldViolation(self._prefix + field, description))

    def length(self, array: Array, field: str, expected: int, of: str) -> None:
        """Records a violation unless `array` has as many elements as `of`."""
        self.check(len(array) == expected, field, f"must have {expected} elements like {of}, got {len(array)}")

    @property
    def ok(self) -> bool:
        return not self.violations

    def done(self) -> None:
        """Raises MeshError INVALID_REQUEST if anything was wrong."""
        if self.violations:
            raise invalid(self.violations, self._what)
