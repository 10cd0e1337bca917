from meshrl.v1 import access_pb2 as _access_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrollRequest(_message.Message):
    __slots__ = ("token", "name", "request", "hosts")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    token: str
    name: str
    request: bytes
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token: _Optional[str] = ..., name: _Optional[str] = ..., request: _Optional[bytes] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("certificates", "run_id", "role", "renewal_port")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_PORT_FIELD_NUMBER: _ClassVar[int]
    certificates: bytes
    run_id: str
    role: str
    renewal_port: int
    def __init__(self, certificates: _Optional[bytes] = ..., run_id: _Optional[str] = ..., role: _Optional[str] = ..., renewal_port: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("certificates",)
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    certificates: bytes
    def __init__(self, certificates: _Optional[bytes] = ...) -> None: ...

class ListRevokedRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRevokedResponse(_message.Message):
    __slots__ = ("members", "next_page_token")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    next_page_token: str
    def __init__(self, members: _Optional[_Iterable[str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
