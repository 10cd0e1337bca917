import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshrl.v1 import access_pb2 as _access_pb2
from meshrl.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "event")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    heartbeat: WorkerHeartbeat
    event: CallEvent
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ..., event: _Optional[_Union[CallEvent, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("contract_version", "worker", "incarnation", "environments", "status", "room", "calls", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    worker: str
    incarnation: str
    environments: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Environment]
    status: _rollout_pb2.GetRolloutStatusResponse
    room: int
    calls: _containers.RepeatedCompositeFieldContainer[HeldCall]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[_rollout_pb2.Environment, _Mapping]]] = ..., status: _Optional[_Union[_rollout_pb2.GetRolloutStatusResponse, _Mapping]] = ..., room: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[HeldCall, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldCall(_message.Message):
    __slots__ = ("call_id", "last_seq", "playing")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PLAYING_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    last_seq: int
    playing: bool
    def __init__(self, call_id: _Optional[str] = ..., last_seq: _Optional[int] = ..., playing: bool = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("number", "status", "room")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    number: int
    status: _rollout_pb2.GetRolloutStatusResponse
    room: int
    def __init__(self, number: _Optional[int] = ..., status: _Optional[_Union[_rollout_pb2.GetRolloutStatusResponse, _Mapping]] = ..., room: _Optional[int] = ...) -> None: ...

class CallEvent(_message.Message):
    __slots__ = ("call_id", "seq", "result", "end")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    seq: int
    result: _rollout_pb2.RunRolloutsResponse
    end: CallEnd
    def __init__(self, call_id: _Optional[str] = ..., seq: _Optional[int] = ..., result: _Optional[_Union[_rollout_pb2.RunRolloutsResponse, _Mapping]] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after_s: float
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("lease", "start", "cancel", "ack", "credit", "answer")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    lease: WorkerLease
    start: StartCall
    cancel: CancelCall
    ack: EventAck
    credit: EventCredit
    answer: HeartbeatAnswer
    def __init__(self, lease: _Optional[_Union[WorkerLease, _Mapping]] = ..., start: _Optional[_Union[StartCall, _Mapping]] = ..., cancel: _Optional[_Union[CancelCall, _Mapping]] = ..., ack: _Optional[_Union[EventAck, _Mapping]] = ..., credit: _Optional[_Union[EventCredit, _Mapping]] = ..., answer: _Optional[_Union[HeartbeatAnswer, _Mapping]] = ...) -> None: ...

class WorkerLease(_message.Message):
    __slots__ = ("contract_version", "lease_s", "heartbeat_s", "credit", "calls", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    lease_s: float
    heartbeat_s: float
    credit: int
    calls: _containers.RepeatedCompositeFieldContainer[CallCursor]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., credit: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[CallCursor, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class CallCursor(_message.Message):
    __slots__ = ("call_id", "next_seq")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    next_seq: int
    def __init__(self, call_id: _Optional[str] = ..., next_seq: _Optional[int] = ...) -> None: ...

class StartCall(_message.Message):
    __slots__ = ("call_id", "request")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    request: _rollout_pb2.RunRolloutsRequest
    def __init__(self, call_id: _Optional[str] = ..., request: _Optional[_Union[_rollout_pb2.RunRolloutsRequest, _Mapping]] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ("call_id",)
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    def __init__(self, call_id: _Optional[str] = ...) -> None: ...

class EventAck(_message.Message):
    __slots__ = ("call_id", "seq", "unneeded")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    UNNEEDED_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    seq: int
    unneeded: bool
    def __init__(self, call_id: _Optional[str] = ..., seq: _Optional[int] = ..., unneeded: bool = ...) -> None: ...

class EventCredit(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: int
    def __init__(self, events: _Optional[int] = ...) -> None: ...

class HeartbeatAnswer(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[AttachedWorker]
    next_page_token: str
    def __init__(self, workers: _Optional[_Iterable[_Union[AttachedWorker, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AttachedWorker(_message.Message):
    __slots__ = ("worker", "attached", "silent_s", "calls", "environments", "status", "attachments", "left_out", "last_seen_time")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TIME_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attached: bool
    silent_s: float
    calls: int
    environments: _containers.RepeatedScalarFieldContainer[str]
    status: _rollout_pb2.GetRolloutStatusResponse
    attachments: int
    left_out: str
    last_seen_time: _timestamp_pb2.Timestamp
    def __init__(self, worker: _Optional[str] = ..., attached: bool = ..., silent_s: _Optional[float] = ..., calls: _Optional[int] = ..., environments: _Optional[_Iterable[str]] = ..., status: _Optional[_Union[_rollout_pb2.GetRolloutStatusResponse, _Mapping]] = ..., attachments: _Optional[int] = ..., left_out: _Optional[str] = ..., last_seen_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
