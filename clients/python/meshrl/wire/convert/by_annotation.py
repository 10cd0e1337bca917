"""Converts by a dataclass's annotations and its message's descriptor.

Fields go by name; their conversion is looked up once for each kind. A new field of the contract needs its line in the
proto and in the dataclass alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from meshrl.v1 import rollout_pb2, runs_pb2, tensor_pb2, trainer_pb2, weights_pb2
from meshrl.wire import tensors
from meshrl.wire import types as wire_types
from meshrl.wire.convert.fields import CHECKS, FieldReader
from meshrl.wire.types import ActivationPolicy, AgentState, RunDrive, RunPhase
from meshrl.wire.types.routes import Routes

T = TypeVar("T")

_MODULES = (rollout_pb2, runs_pb2, trainer_pb2, weights_pb2)
_OTHER_NAMES = {
    "AgentRegistration": "RegisterRequest",
    "AgentReport": "SessionRequest",
    "Activation": "ActivateVersionResponse",
    "ActivationRequest": "ActivateVersionRequest",
    "EnvironmentInfo": "Environment",
    "Lease": "RegisterResponse",
    "OpenedGroup": "OpenGroupResponse",
    "RolloutRequest": "RunRolloutsRequest",
    "RolloutStatus": "GetRolloutStatusResponse",
    "RunInfo": "Run",
    "SleepOutcome": "SleepEnginesResponse",
    "StagedVersion": "CreateVersionResponse",
    "StepEvent": "WatchStepsResponse",
    "TrainerInfo": "GetTrainerResponse",
    "VersionEvent": "WatchVersionsResponse",
}
_UNKNOWN: Mapping[type[enum.Enum], enum.Enum] = {
    AgentState: AgentState.JOINING,
    ActivationPolicy: ActivationPolicy.ROLLING,
    RunDrive: RunDrive.BATCHES,
    RunPhase: RunPhase.ACTIVE,  # a trainer of 1.0 states none
}
"""For a newer peer's value: a state that vouches for nothing, a policy that pauses no other engine."""

Read = Callable[[Any, FieldReader, str], Any]
"""Of a message, one field; the last argument is the message's path in errors, with its dot."""


@cache
def message_of(kind: type) -> Any:
    name = _OTHER_NAMES.get(kind.__name__, kind.__name__)
    return next(getattr(module, name) for module in _MODULES if hasattr(module, name))


def to_proto(value: Any, **others: object) -> Any:
    """`others` are fields that only the message has."""
    kind: Any = type(value)
    fields = {
        name: getattr(value, name) if encode is None else encode(getattr(value, name))
        for name, encode in _encoders(kind)
    }
    return message_of(kind)(**fields, **others)


def from_proto(kind: type[T], message: Message, field: str = "") -> T:
    """An unset optional field is None. `field` names the message in errors. Raises MeshError INVALID_REQUEST with
    every unreadable tensor and enum."""
    reader = FieldReader(f"the {_words(message.DESCRIPTOR.name).lower()}", field)
    value = read(kind, message, reader, "")
    reader.done()
    return value


def read(kind: type[T], message: Any, reader: FieldReader, path: str) -> T:
    """As `from_proto`; errors stay in the reader."""
    plain, others = _decoders(typing.cast("Any", kind))
    fields = {name: getattr(message, name) for name in plain}
    for name, decode in others:
        fields[name] = decode(message, reader, path)
    make: Callable[..., T] = kind
    value = make(**fields)
    check = CHECKS.get(kind)
    if check is not None and reader.ok:
        check(value, reader, path)
    return value


@cache
def _encoders(kind: type) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    fields = message_of(kind).DESCRIPTOR.fields_by_name
    assert dataclasses.is_dataclass(kind)
    return tuple((field.name, _encoder(fields[field.name])) for field in dataclasses.fields(kind))


def _encoder(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    each: Callable[[Any], Any]
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return None
        if field.message_type.name == "RolloutLogprobs":
            return _logprobs_to_proto
        each = _LEAVES.get(field.message_type.full_name, to_proto)
    elif field.enum_type is not None:
        each = _numbers(field).__getitem__
    elif field.type == FieldDescriptor.TYPE_BYTES:
        each = bytes  # also of a view
    else:
        return None
    if field.is_repeated:
        return lambda values: [each(value) for value in values]
    return lambda value: None if value is None else each(value)


def _timestamp(epoch_s: float) -> Timestamp:
    seconds, fraction = divmod(epoch_s, 1.0)
    carried, nanos = divmod(round(fraction * 1e9), 10**9)
    return Timestamp(seconds=int(seconds) + carried, nanos=nanos)


_LEAVES: Mapping[str, Callable[[Any], Any]] = {
    "google.protobuf.Timestamp": _timestamp,
    "meshrl.v1.Tensor": tensors.encode,
}
"""Values that are no dataclass, by the message's name."""


def _numbers(field: FieldDescriptor) -> dict[Any, int]:
    """By our enum's members, or element types' names."""
    assert field.enum_type is not None
    if field.enum_type.name == "DataType":
        return {name: dtype.number for name, dtype in tensors.DTYPES.items()}
    members: type[enum.Enum] = getattr(wire_types, field.enum_type.name)
    prefix = _words(field.enum_type.name).replace(" ", "_").upper()
    by_name = field.enum_type.values_by_name
    return {member: by_name[f"{prefix}_{member.name}"].number for member in members}


@cache
def _decoders(kind: type) -> tuple[tuple[str, ...], tuple[tuple[str, Read], ...]]:
    fields: Mapping[str, FieldDescriptor] = message_of(kind).DESCRIPTOR.fields_by_name
    plain, others = [], []
    for name, annotation in typing.get_type_hints(kind).items():
        decode = _decoder(fields[name], annotation)
        if decode is None:
            plain.append(name)
        else:
            others.append((name, decode))
    return tuple(plain), tuple(others)


def _decoder(field: FieldDescriptor, annotation: Any) -> Read | None:
    name = field.name
    inner, may_be_none = unwrapped(annotation)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return lambda message, reader, path: dict(getattr(message, name))
    if field.message_type is not None and field.message_type.name == "RolloutLogprobs":
        return lambda message, reader, path: _logprobs(getattr(message, name))
    if field.is_repeated:
        return _many(field, inner)
    one = _one(field, inner)
    if may_be_none:
        if one is None:
            return lambda message, reader, path: getattr(message, name) if message.HasField(name) else None
        return lambda message, reader, path: (
            one(getattr(message, name), reader, path + name) if message.HasField(name) else None
        )
    if one is None:
        return None
    return lambda message, reader, path: one(getattr(message, name), reader, path + name)


def _many(field: FieldDescriptor, inner: Any) -> Read:
    name = field.name
    if field.enum_type is not None and field.enum_type.name != "DataType":  # those of a newer peer are left out
        known = {number: member for member, number in _numbers(field).items()}
        return lambda message, reader, path: tuple(known[each] for each in getattr(message, name) if each in known)
    one = _one(field, inner)
    if one is None:
        return lambda message, reader, path: tuple(getattr(message, name))
    return lambda message, reader, path: tuple(
        one(each, reader, f"{path}{name}[{place}]") for place, each in enumerate(getattr(message, name))
    )


def _one(field: FieldDescriptor, inner: Any) -> Read | None:
    """Reads one value; the last argument is its path. None takes it as it is."""
    if field.message_type is tensor_pb2.Tensor.DESCRIPTOR:
        if inner == Routes:
            return lambda value, reader, path: reader.routes(value, path)
        dtype = dtype_of(inner)
        return lambda value, reader, path: reader.vector(value, path, dtype)
    if field.message_type is Timestamp.DESCRIPTOR:
        return lambda value, reader, path: value.seconds + value.nanos / 1e9
    if field.message_type is not None:
        return lambda value, reader, path: read(inner, value, reader, f"{path}.")
    if field.enum_type is not None:
        return _enum(field, inner)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return lambda value, reader, path: decimal(value)
    return None


def dtype_of(annotation: Any) -> str:
    """int32 of NDArray[np.int32]; numpy 2.5 keeps an alias that older releases spell out."""
    while arguments := typing.get_args(annotation):
        annotation = arguments[-1]
    name: str = np.dtype(annotation).name
    return name


def _enum(field: FieldDescriptor, inner: Any) -> Read:
    known = {number: member for member, number in _numbers(field).items()}
    otherwise = _UNKNOWN.get(inner)

    def decode(value: int, reader: FieldReader, path: str) -> Any:
        member = known.get(value, otherwise)
        reader.check(member is not None, path, f"{value} is not known here")
        return member

    return decode


def unwrapped(annotation: Any) -> tuple[Any, bool]:
    """A field's type without its tuple, and whether it may be None."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(annotation) if option is not types.NoneType]
        return functools.reduce(operator.or_, options), len(options) < len(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], False
    return annotation, False


def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name)


def decimal(value: float) -> float:
    """Undoes a float32 field's widening: 0.8999999761581421 is 0.9 again."""
    return float(str(np.float32(value))) if math.isfinite(value) else value


def _logprobs_to_proto(logprobs: Mapping[str, Any]) -> list[trainer_pb2.RolloutLogprobs]:
    return [
        trainer_pb2.RolloutLogprobs(rollout_id=rollout_id, logprobs=tensors.encode(values))
        for rollout_id, values in logprobs.items()
    ]


def _logprobs(messages: Iterable[trainer_pb2.RolloutLogprobs]) -> dict[str, Any]:
    """Without unreadable ones: they are only for people."""
    found = {}
    for message in messages:
        reader = FieldReader("the logprobs")
        values = reader.vector(message.logprobs, "logprobs", "float32")
        if reader.ok:
            found[message.rollout_id] = values
    return found
