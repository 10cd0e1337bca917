"""Writes meshrl/v1 from proto/, run by generate_stubs.sh: `python generate_stubs.py OUT`.

The stubs do not carry the constraints, so that they need no package of buf.validate at run time, and another package's
copy of it in the same process is no conflict. `meshrl/v1/rules.py` has them as a table, which `meshrl.wire.validate`
reads.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

PROTO = Path(__file__).parents[1] / "proto"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
CONSTRAINTS = "buf/validate/validate.proto"
HEADER = '"""Generated from proto/meshrl/v1 by `make proto`; do not edit."""\n'


def run(*arguments: str) -> None:
    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit(f"protoc {' '.join(arguments)} failed")


class Rules:
    """Reads the constraints in options, which descriptors hold as fields that they do not know."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self._pool = DescriptorPool()
        for file in files.file:
            self._pool.Add(file)

    def of(self, kind: str, options: Any) -> dict[str, Any]:
        """kind: "field", "oneof" or "message"."""
        known = GetMessageClass(self._pool.FindMessageTypeByName(options.DESCRIPTOR.full_name))
        rules = known.FromString(options.SerializeToString()).Extensions[
            self._pool.FindExtensionByName(f"buf.validate.{kind}")
        ]
        return MessageToDict(rules, preserving_proto_field_name=True)


def plain(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules of a field in one level: those of its type beside the others. Numbers of 64 bits are text in JSON."""
    found: dict[str, Any] = {}
    for name, value in rules.items():
        if name in ("cel", "items"):
            found[name] = plain(value) if name == "items" else value
        elif isinstance(value, dict):
            found |= plain(value)
        else:
            found[name] = int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value
    return found


def messages(found: DescriptorProto, name: str) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, found
    for nested in found.nested_type:
        yield from messages(nested, f"{name}.{nested.name}")


def take_rules(rules: Rules, message: DescriptorProto) -> dict[str, dict[str, Any]]:
    """Removes the constraints of a message from its descriptor and returns them."""
    parts = [("message", "", message), *(("oneof", one.name, one) for one in message.oneof_decl)]
    found: dict[str, dict[str, Any]] = {}
    for kind, name, part in (*parts, *(("field", field.name, field) for field in message.field)):
        if part.HasField("options"):
            found[name] = plain(rules.of(kind, part.options))
            part.options.DiscardUnknownFields()
            if not part.options.ListFields():
                part.ClearField("options")
    for field in message.field:
        field.ClearField("json_name")  # which follows from the name
    return {name: held for name, held in found.items() if held}


def source(table: dict[str, dict[str, Any]]) -> str:
    """A module with the table."""
    lines = [HEADER, "from typing import Any\n", "RULES: dict[str, dict[str, dict[str, Any]]] = {"]
    for message, fields in sorted(table.items()):
        lines += [f"    {message!r}: {{", *(f"        {name!r}: {held!r}," for name, held in fields.items()), "    },"]
    about = "Constraints by message, then by field or oneof; those of a whole message are under the empty name."
    return "\n".join([*lines, "}", f'"""{about}"""', ""])


def main(out: Path) -> None:
    own = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / "meshrl").rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as file:
        all_of_it = ("--include_imports", "--include_source_info")
        run("-I", str(PROTO), "-I", str(WELL_KNOWN), *all_of_it, f"--descriptor_set_out={file.name}", *own)
        files = FileDescriptorSet.FromString(Path(file.name).read_bytes())
        rules = Rules(files)
        table: dict[str, dict[str, Any]] = {}
        for each in files.file:
            if each.name not in own:
                continue
            for top in each.message_type:
                for name, message in messages(top, f"{each.package}.{top.name}"):
                    if held := take_rules(rules, message):
                        table[name] = held
            for extension in each.extension:
                extension.ClearField("json_name")
            if CONSTRAINTS in each.dependency:
                each.dependency.remove(CONSTRAINTS)
        Path(file.name).write_bytes(files.SerializeToString())
        to = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        run(f"--descriptor_set_in={file.name}", *to, *own)
    package = out / "meshrl" / "v1"
    (package / "__init__.py").write_text(HEADER)
    (package / "rules.py").write_text(source(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
