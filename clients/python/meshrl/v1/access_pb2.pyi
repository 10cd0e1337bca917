from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ANY: _ClassVar[Role]
    ROLE_PUBLISHER: _ClassVar[Role]
    ROLE_AGENT: _ClassVar[Role]
    ROLE_HUB: _ClassVar[Role]
    ROLE_RELAY: _ClassVar[Role]
    ROLE_ROLLOUT: _ClassVar[Role]
    ROLE_ORCHESTRATOR: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]
    ROLE_VIEWER: _ClassVar[Role]
    ROLE_TENANT: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_ANY: Role
ROLE_PUBLISHER: Role
ROLE_AGENT: Role
ROLE_HUB: Role
ROLE_RELAY: Role
ROLE_ROLLOUT: Role
ROLE_ORCHESTRATOR: Role
ROLE_OPERATOR: Role
ROLE_VIEWER: Role
ROLE_TENANT: Role
ALLOWED_ROLES_FIELD_NUMBER: _ClassVar[int]
allowed_roles: _descriptor.FieldDescriptor
