"""Calls to every method that a gRPC server reflects, made up from the descriptors by a seeded generator.

`methods_of` asks a live server for its methods, so a new RPC is covered without a change here. `CallGenerator` makes up
the messages of a call: sound ones, sound ones with broken bytes, noise, and none or too many of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from meshrl.core.rpc.reflection import describe_v1
from meshrl.wire.errors import MeshError, Reason, from_rpc_error

MAX_DEPTH = 4
MAX_ANSWERS = 20

# Values at and beyond the borders of what a field may hold, by its kind in protobuf's C++ API.
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2, 127, 4096, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 127, 65536, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 3, 2**31, 2**53, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 1000, 2**32, 2**63, 2**64 - 1),
}
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
DOUBLES = (*FLOATS, 1e308, 5e-324)
TEXTS = ("", "x", "main", "a/../../b", "é\u0000ü", "%s{}$(x)", "\n" * 3, "x" * 300, "y" * 20_000, "null", "-1")


@dataclass(frozen=True)
class Method:
    """One method of a live server."""

    full_name: str
    descriptor: MethodDescriptor

    @property
    def waits(self) -> bool:
        """True for calls that last for as long as their caller likes, by a field of theirs or as a stream."""
        fields = self.descriptor.input_type.fields
        return self.descriptor.server_streaming or any(each.name.endswith("deadline_s") for each in fields)

    @property
    def path(self) -> str:
        return f"/{self.full_name}"


async def methods_of(channel: grpc.aio.Channel) -> list[Method]:
    """The methods of every service that the server's reflection lists."""

    async def question() -> Any:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = [answer async for answer in stub.ServerReflectionInfo(question(), timeout=60.0)]
    services = [service.name for service in answers[0].list_services_response.service]
    pool = descriptor_pool.Default()
    describe_v1()
    return [
        Method(f"{service}/{method.name}", method)
        for service in services
        for method in pool.FindServiceByName(service).methods
    ]


class CallGenerator:
    """Makes up the messages of calls. `known` has values that mean something to the server, by the field's name."""

    def __init__(self, seed: int, known: Mapping[str, Sequence[Any]]) -> None:
        self._random = random.Random(seed)
        self._known = known
        self._known_share = 0.0

    def messages(self, method: Method, destructive: Mapping[str, Callable[[Any], None]]) -> list[bytes]:
        """The bytes of each message of one call.

        `destructive` names methods that must not be called with success, each with what makes a sound message one that
        is refused.
        """
        if not method.descriptor.client_streaming:
            count = 1 if method.full_name in destructive else self._random.choices((0, 1, 2), weights=(1, 30, 1))[0]
        else:
            count = self._random.choice((0, 1, 1, 2, 3, 5))
        kind = method.descriptor.input_type
        self._known_share = self._random.choice((0.2, 0.6, 1.0))
        if method.full_name in destructive:
            return [self._harmless(kind, destructive[method.full_name]) for _ in range(count)]
        return [self._message(kind) for _ in range(count)]

    def _harmless(self, kind: Descriptor, spoil: Callable[[Any], None]) -> bytes:
        if self._random.random() < 0.4:
            return self._undecodable(kind)
        message = self.sound(kind)
        spoil(message)
        return message.SerializeToString()

    def _message(self, kind: Descriptor) -> bytes:
        shape = self._random.choices(("sound", "broken", "noise", "empty"), weights=(10, 6, 3, 1))[0]
        if shape == "empty":
            return b""
        if shape == "noise":
            return self._random.randbytes(self._random.choice((1, 2, 7, 40, 300, 70_000)))
        data = self.sound(kind).SerializeToString()
        return data if shape == "sound" else self._break(data)

    def _undecodable(self, kind: Descriptor) -> bytes:
        into = message_factory.GetMessageClass(kind)()
        while True:
            data = self._random.randbytes(self._random.choice((2, 20, 400)))
            try:
                into.ParseFromString(data)
            except DecodeError:
                return data

    def _break(self, data: bytes) -> bytes:
        broken = bytearray(data)
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(broken) + 1)
            how = self._random.randrange(4)
            if how == 0 and at < len(broken):
                broken[at] ^= 1 << self._random.randrange(8)
            elif how == 1:
                del broken[at:]
            elif how == 2:
                broken[at:at] = self._random.randbytes(self._random.randint(1, 9))
            else:
                broken[at:at] = broken[: self._random.randrange(len(broken) + 1)]
        return bytes(broken)

    def sound(self, kind: Descriptor, depth: int = 0) -> Message:
        """A message of this kind with most of its fields set, each to a value of its type."""
        message = message_factory.GetMessageClass(kind)()
        share = self._random.choice((0.3, 0.8, 1.0))
        left_out = {each.name for oneof in kind.oneofs for each in self._all_but_one(oneof.fields)}
        for each in kind.fields:
            if (
                each.name in left_out
                or self._random.random() > share
                or (each.message_type is not None and depth >= MAX_DEPTH)
            ):
                continue
            if each.message_type is not None and each.message_type.GetOptions().map_entry:
                self._fill_map(message, each, depth)
            elif each.is_repeated:
                for _ in range(self._random.choice((0, 1, 1, 2, 5))):
                    self._add(getattr(message, each.name), each, depth)
            elif each.message_type is not None:
                getattr(message, each.name).CopyFrom(self.sound(each.message_type, depth + 1))
            else:
                setattr(message, each.name, self._value(each))
        return message

    def _all_but_one(self, fields: Sequence[FieldDescriptor]) -> list[FieldDescriptor]:
        kept = self._random.choice(fields)
        return [each for each in fields if each is not kept]

    def _fill_map(self, message: Message, each: FieldDescriptor, depth: int) -> None:
        key, value = each.message_type.fields_by_name["key"], each.message_type.fields_by_name["value"]
        entries = getattr(message, each.name)
        for _ in range(self._random.randrange(3)):
            if value.message_type is not None:
                entries[self._value(key)].CopyFrom(self.sound(value.message_type, depth + 1))
            else:
                entries[self._value(key)] = self._value(value)

    def _add(self, values: Any, each: FieldDescriptor, depth: int) -> None:
        if each.message_type is not None:
            values.append(self.sound(each.message_type, depth + 1))
        else:
            values.append(self._value(each))

    def _value(self, each: FieldDescriptor) -> Any:
        is_bytes = each.type == FieldDescriptor.TYPE_BYTES
        known = [value for value in self._known.get(each.name, ()) if isinstance(value, bytes) is is_bytes]
        if known and self._random.random() < self._known_share:
            return self._random.choice(known)
        kind = each.cpp_type
        if kind in INTEGERS:
            return self._random.choice(INTEGERS[kind])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_FLOAT:
            return self._random.choice(FLOATS)
        if kind == FieldDescriptor.CPPTYPE_DOUBLE:
            return self._random.choice(DOUBLES)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return self._random.choice((*(value.number for value in each.enum_type.values), 77, -1))
        if is_bytes:
            return self._random.randbytes(self._random.choice((0, 1, 16, 64, 4000)))
        return self._random.choice(TEXTS)


@dataclass
class Outcomes:
    """How the calls ended: counted by method and code, with the calls that ended as no call may."""

    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def record(self, method: Method, sent: Sequence[bytes], error: grpc.aio.AioRpcError | None) -> None:
        code = grpc.StatusCode.OK if error is None else error.code()
        self.codes[method.full_name, code.name] += 1
        hangs = code is grpc.StatusCode.DEADLINE_EXCEEDED and not method.waits
        if error is not None and (hangs or is_defect(error)):
            heads = [data[:200] for data in sent[:3]]
            self.wrong.append(f"{method.full_name}: {code.name}: {error.details()} after {len(sent)} of {heads}")


def is_defect(error: grpc.aio.AioRpcError) -> bool:
    """True for INTERNAL and UNKNOWN, unless it is grpc.aio's own name for a write into a call that was refused."""
    if error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return False
    failure: MeshError = from_rpc_error(error)
    return failure.reason is not Reason.UNREACHABLE


async def call(
    channel: grpc.aio.Channel, method: Method, sent: Sequence[bytes], deadline_s: float, metadata: Any = None
) -> Any:
    """Sends the messages one by one and reads some answers; returns the error that ended the call, or None.

    All kinds of calls are alike on the wire, so each is made as a stream each way.
    """
    stream = channel.stream_stream(method.path)(timeout=deadline_s, metadata=metadata)
    try:
        for data in sent:
            await stream.write(data)
        await stream.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
        pass  # refused before the last message, which grpc.aio says in three ways; the status comes below
    try:
        for _ in range(MAX_ANSWERS):
            if await stream.read() is grpc.aio.EOF:
                break
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        stream.cancel()
    return None
