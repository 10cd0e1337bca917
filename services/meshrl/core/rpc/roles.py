"""Which role may call which RPC, and which runs a caller may name in it, by proto/.

The option `allowed_roles` lists the roles of each RPC; one without it admits no member. Requests name runs in fields
`run_id`, also of messages inside them. Answers to a credential with patterns of runs list only those runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.client.trust import Role
from meshrl.v1 import access_pb2, exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import MeshError, Reason

METHODS: Mapping[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for module in (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""RPCs by "package.Service/Method"."""

OWN_WHERE_EMPTY = frozenset({"spec.start_from.run_id"})
"""An empty text is the run named elsewhere in the request."""


def _allowed(method: MethodDescriptor) -> frozenset[Role]:
    options: Any = method.GetOptions()  # the stubs type an extension as its descriptor
    named = options.Extensions[access_pb2.allowed_roles]
    if access_pb2.ROLE_ANY in named:
        return frozenset(Role)
    return frozenset(Role(access_pb2.Role.Name(role).removeprefix("ROLE_").lower()) for role in named)


def _paths(message: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[str]:
    for field in message.fields:
        if field.is_repeated:
            continue
        if field.message_type is None:
            if field.name == "run_id":
                yield field.name
        elif field.message_type not in (message, *above):
            yield from (f"{field.name}.{path}" for path in _paths(field.message_type, (message, *above)))


def _lists(message: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in message.fields:
        entry = field.message_type
        if entry is None or entry in (message, *above):
            continue
        if field.is_repeated and "run_id" in entry.fields_by_name:
            yield (field.name,)
        else:
            yield from ((field.name, *path) for path in _lists(entry, (message, *above)))


ROLES_OF: Mapping[str, frozenset[Role]] = {name: _allowed(method) for name, method in METHODS.items()}
PATHS_OF: Mapping[str, tuple[str, ...]] = {name: tuple(_paths(method.input_type)) for name, method in METHODS.items()}
"""Where a request names a run."""

LISTS_OF: Mapping[str, tuple[tuple[str, ...], ...]] = {
    name: tuple(_lists(method.output_type)) for name, method in METHODS.items()
}
"""The ways to each list of an answer whose entries name a run."""


def check_runs(caller: object, patterns: Sequence[str], method: str, request: object) -> None:
    """Raises PERMISSION_DENIED if a request names a run, or none, that no pattern fits. Bulk comes as its bytes."""
    paths = PATHS_OF.get(method, ())
    if not patterns or not paths:
        return
    message = GetMessageClass(METHODS[method].input_type).FromString(request) if isinstance(request, bytes) else request
    assert isinstance(message, Message)
    for path in paths:
        run_id = _value(message, path)
        if run_id is None or (not run_id and path in OWN_WHERE_EMPTY):
            continue
        if not _fits(run_id, patterns):
            named = f"run {run_id!r}" if run_id else "no run"
            raise MeshError(
                Reason.PERMISSION_DENIED,
                f"{caller} may use the runs {', '.join(patterns)}, and {method} names {named} in {path}; name one of"
                " them, or use a credential for it (meshrl token create --runs PATTERN)",
            )


def hide_runs(patterns: Sequence[str], method: str, answer: object) -> None:
    for path in LISTS_OF.get(method, ()) if patterns else ():
        assert isinstance(answer, Message)  # bulk has no lists of runs
        _hide(answer, path, patterns)


def _hide(message: Message, path: tuple[str, ...], patterns: Sequence[str]) -> None:
    name, *below = path
    field = getattr(message, name)
    if not below:
        kept = [entry for entry in field if _fits(entry.run_id, patterns)]
        del field[:]
        field.extend(kept)
        return
    for inner in field if message.DESCRIPTOR.fields_by_name[name].is_repeated else [field]:
        _hide(inner, tuple(below), patterns)


def _fits(run_id: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(run_id, pattern) for pattern in patterns)


def _value(message: Message, path: str) -> str | None:
    *around, name = path.split(".")
    for field in around:
        if not message.HasField(field):
            return None
        message = getattr(message, field)
    return str(getattr(message, name))
