"""Copies fields between messages and dataclasses by name, and collects what is wrong with those that were received.

Used by every converter of this package. One answer names every bad field of a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from meshrl.v1 import tensor_pb2
from meshrl.wire import tensors
from meshrl.wire.errors import FieldViolation, MeshError, invalid
from meshrl.wire.values import Array

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def optional(message: Message, field: str) -> Any:
    """Returns the value of an `optional` or oneof field, or None when it is unset."""
    return getattr(message, field) if message.HasField(field) else None


def to_message(kind: Callable[..., M], value: object, /, **converted: object) -> M:
    """Returns the message with the fields of a dataclass, by name; `converted` are fields that differ in their form."""
    assert dataclasses.is_dataclass(value)
    names = {field.name for field in dataclasses.fields(value)} - converted.keys()
    return kind(**{name: getattr(value, name) for name in names}, **converted)


def from_message(kind: type[T], message: Message, /, **converted: object) -> T:
    """Returns the dataclass with the fields of a message, by name; an optional field that is unset is None.

    `converted` are fields that differ in their form, those that hold messages among them.
    """
    assert dataclasses.is_dataclass(kind)
    make: Callable[..., T] = kind
    plain: dict[str, object] = {}
    for name in {field.name for field in dataclasses.fields(kind)} - converted.keys():
        value = getattr(message, name)
        if message.DESCRIPTOR.fields_by_name[name].has_presence:
            value = optional(message, name)
        elif not isinstance(value, (str, bytes, int, float)):
            value = tuple(value)
        plain[name] = value
    return make(**plain, **converted)


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
