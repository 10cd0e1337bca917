"""The contract's minor version grows with its descriptors: those of released versions are in proto/released."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

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
