"""Which run a request is about, and whether a caller whose credential has patterns of runs may name it.

Derived from the protos: every field `run_id` of a request, also inside its messages, such as a batch's header or a
version's manifest. A caller without patterns may name any run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.v1 import exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import MeshError, Reason

OWN_WHERE_EMPTY = frozenset({"spec.start_from.run_id"})
"""Fields in which an empty text is the run named elsewhere in the request."""


def _paths(message: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[str]:
    for field in message.fields:
        if field.is_repeated:
            continue
        if field.message_type is None:
            if field.name == "run_id":
                yield field.name
        elif field.message_type not in (message, *above):
            yield from (f"{field.name}.{path}" for path in _paths(field.message_type, (message, *above)))


PATHS_OF: Mapping[str, tuple[str, ...]] = {
    f"{service.full_name}/{method.name}": tuple(_paths(method.input_type))
    for module in (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Where a request of each RPC ("package.Service/Method") names a run."""
_REQUEST_OF = {
    f"{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for module in (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def check_runs(caller: object, patterns: Sequence[str], method: str, request: object) -> None:
    """Raises PERMISSION_DENIED where a request names a run, or no run, that no pattern fits. `request` is one message
    of the call; bulk comes as its bytes."""
    paths = PATHS_OF.get(method, ())
    if not patterns or not paths:
        return
    message = _REQUEST_OF[method].FromString(request) if isinstance(request, bytes) else request
    assert isinstance(message, Message)
    for path in paths:
        run_id = _value(message, path)
        if run_id is None or (not run_id and path in OWN_WHERE_EMPTY):
            continue
        if not any(fnmatchcase(run_id, pattern) for pattern in patterns):
            named = f"run {run_id!r}" if run_id else "no run"
            raise MeshError(
                Reason.PERMISSION_DENIED,
                f"{caller} may use the runs {', '.join(patterns)}, and {method} names {named} in {path}; name one of"
                " them, or use a credential for it (meshrl token create --runs PATTERN)",
            )


def _value(message: Message, path: str) -> str | None:
    """None where the message around it is not set, as in all but the first of a stream."""
    *around, name = path.split(".")
    for field in around:
        if not message.HasField(field):
            return None
        message = getattr(message, field)
    return str(getattr(message, name))
