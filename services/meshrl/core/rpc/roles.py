"""Which role may call which RPC, as the option `allowed_roles` of each RPC in proto/. One without it admits no member.

A caller's role is in its certificate or token; a server without credentials asks for neither. Health and reflection are
open to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from meshrl.client.trust import Role
from meshrl.v1 import access_pb2, exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2


def _allowed(method: MethodDescriptor) -> frozenset[Role]:
    options: Any = method.GetOptions()  # the stubs type an extension as its descriptor
    named = options.Extensions[access_pb2.allowed_roles]
    if access_pb2.ROLE_ANY in named:
        return frozenset(Role)
    return frozenset(Role(access_pb2.Role.Name(role).removeprefix("ROLE_").lower()) for role in named)


ROLES_OF: Mapping[str, frozenset[Role]] = {
    f"{service.full_name}/{method.name}": _allowed(method)
    for module in (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
