"""The contract's minor version grows with its descriptors: those of released versions are in proto/released."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool as default_pool
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass, GetMessageClassesForFiles

import meshrl.v1
from meshrl.wire.types import CONTRACT_VERSION

RELEASED = Path(__file__).parents[3] / "proto" / "released"


def elements(files: list[FileDescriptorProto]) -> Iterator[str]:
    """Each field, value of an enum and RPC, with its number and types."""
    for file in files:
        for message in file.message_type:
            yield from fields(message, message.name)
        for enum in file.enum_type:
            yield from (f"{enum.name}.{value.name} = {value.number}" for value in enum.value)
        for service in file.service:
            for rpc in service.method:
                streams = f"{rpc.client_streaming:d}{rpc.server_streaming:d}"
                yield f"{service.name}/{rpc.name} {rpc.input_type} {rpc.output_type} {streams}"


def fields(message: DescriptorProto, path: str) -> Iterator[str]:
    for field in message.field:
        presence = "optional " if field.proto3_optional else ""
        yield f"{path}.{field.name} = {field.number}: {presence}{field.label} {field.type}{field.type_name}"
    for nested in message.nested_type:
        yield from fields(nested, f"{path}.{nested.name}")


def current() -> set[str]:
    files = []
    for path in sorted(Path(next(iter(meshrl.v1.__path__))).glob("*_pb2.py")):
        file = FileDescriptorProto()
        importlib.import_module(f"meshrl.v1.{path.stem}").DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return set(elements(files))


def released(version: str) -> set[str]:
    found = FileDescriptorSet.FromString((RELEASED / f"{version}.binpb").read_bytes())
    return set(elements([file for file in found.file if file.package == "meshrl.v1"]))


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_version_is_above_the_last_released_one_exactly_if_the_descriptors_differ_from_it() -> None:
    last = max((path.stem for path in RELEASED.glob("*.binpb")), key=number)
    changed = current() ^ released(last)
    expected = (number(last)[0], number(last)[1] + bool(changed))
    assert number(CONTRACT_VERSION) == expected, (
        f"the contract differs from {last} in {len(changed)} elements, such as {sorted(changed)[:3]}; "
        f"set CONTRACT_VERSION in meshrl.wire.types to {'.'.join(map(str, expected))}"
    )


def test_what_the_last_version_has_stays() -> None:
    """Only presence may change, as of a reward that must not be forgotten."""
    gone = released("1.0") - {element.replace(": optional ", ": ") for element in current()}
    assert not {element for element in gone if ": optional " not in element}


def filled(message: Message, depth: int = 0) -> Message:
    """The message with a value other than the default in every field; of a oneof the last member stays."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[scalar(key)] = scalar(value)
        elif field.message_type is not None:
            if depth < 6:
                target = getattr(message, field.name)
                filled(target.add() if field.is_repeated else target, depth + 1)
                if not field.is_repeated:
                    target.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend([scalar(field)] * 2)
        else:
            setattr(message, field.name, scalar(field))
    return message


def scalar(field: FieldDescriptor) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    kinds = {FieldDescriptor.CPPTYPE_STRING: "text", FieldDescriptor.CPPTYPE_BOOL: True}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"bytes"
    return kinds.get(field.cpp_type, 7)


def messages_of_1_0() -> list[type[Message]]:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((RELEASED / "1.0.binpb").read_bytes()).file:
        pool.Add(file)
    names = [name for name in GetMessageClassesForFiles(files_of(pool), pool) if name.startswith("meshrl.v1.")]
    return [GetMessageClass(pool.FindMessageTypeByName(name)) for name in sorted(names)]


def files_of(pool: DescriptorPool) -> list[str]:
    found = FileDescriptorSet.FromString((RELEASED / "1.0.binpb").read_bytes())
    return [file.name for file in found.file]


@pytest.mark.parametrize("then", messages_of_1_0(), ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_message_of_1_0_is_read_now_and_one_of_now_then(then: type[Message]) -> None:
    """Every field of 1.0 keeps its value over the wire and in JSON, both ways; what is newer is passed over."""
    now = GetMessageClass(default_pool.Default().FindMessageTypeByName(then.DESCRIPTOR.full_name))
    sent = filled(then())
    received = now.FromString(sent.SerializeToString())
    assert then.FromString(received.SerializeToString()) == sent
    assert Parse(MessageToJson(received), then(), ignore_unknown_fields=True) == sent
    assert Parse(MessageToJson(sent), now()) == received
    newer = filled(now())
    understood = then.FromString(newer.SerializeToString())
    understood.DiscardUnknownFields()
    shared = {field.name for field in then.DESCRIPTOR.fields}
    assert {field.name for field, _ in understood.ListFields()} <= shared
