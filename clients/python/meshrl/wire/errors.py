"""The error catalogue: why calls between services fail, as a gRPC status and back.

A servicer raises `MeshError`, the server makes a status with `google.rpc` details of it, the client a MeshError again.
`ErrorInfo` has the reason's name, with domain "meshrl".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "meshrl"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# A peer with gRPC's defaults drops a response whose metadata passes 8 KiB (as base64), so texts are cut, in bytes.
_MAX_MESSAGE_BYTES = 900
_MAX_VIOLATIONS = 20
_MAX_FIELD_BYTES = 60
_MAX_DESCRIPTION_BYTES = 120
_MAX_METADATA_ENTRIES = 8
_MAX_METADATA_BYTES = 80

# What gRPC itself says of calls that end without a status of the server's making.
_LOCALLY_CANCELLED = "Locally cancelled by application!"
_BARE_CANCELLATIONS = ("", "CANCELLED", "Cancelled")
_BARE_DEADLINES = ("", "Deadline Exceeded")

# What grpc.aio makes of a stream that ends under a write; it hides the server's status (grpc/grpc#36066).
_WRITE_FAILED = "Internal error from Core"

_Code = grpc.StatusCode


class Reason(enum.Enum):
    """With its gRPC status; `retryable`: the same call may succeed later."""

    INVALID_REQUEST = (_Code.INVALID_ARGUMENT, False, "the request is malformed; every bad field is named")
    MESSAGE_TOO_LARGE = (_Code.RESOURCE_EXHAUSTED, False, "a message is larger than a peer takes")
    UNKNOWN_ENVIRONMENT = (_Code.NOT_FOUND, False, "the rollout server does not host this environment")
    UNKNOWN_TASK = (_Code.NOT_FOUND, False, "the environment has no such task")
    VERSION_NOT_AVAILABLE = (_Code.FAILED_PRECONDITION, True, "no engine serves a version that satisfies the request")
    LOGPROBS_BIASED = (
        _Code.FAILED_PRECONDITION,
        False,
        "no engine reports logprobs of the distribution that the sampling asks for; training on others is biased",
    )
    OVERLOADED = (_Code.RESOURCE_EXHAUSTED, True, "the server's queue is full")
    DRAINING = (_Code.UNAVAILABLE, True, "the server is shutting down and takes no new work")
    DUPLICATE_REQUEST = (_Code.ALREADY_EXISTS, False, "this request_id was seen before and its answer is not kept")
    DEADLINE_PASSED = (_Code.DEADLINE_EXCEEDED, True, "no answer before the deadline")
    CANCELLED = (_Code.CANCELLED, False, "the caller cancelled the call")
    ENVIRONMENT_FAILED = (_Code.INTERNAL, True, "an environment crashed while it ran or scored an episode")
    BAD_ROLLOUT = (_Code.INVALID_ARGUMENT, False, "a finished rollout holds what no trainer takes")
    ENGINE_FAILED = (_Code.UNAVAILABLE, True, "an inference engine did not answer or answered with an error")
    UNKNOWN_RUN = (_Code.NOT_FOUND, False, "the server has no run of this name")
    RUN_EXISTS = (_Code.ALREADY_EXISTS, False, "a run of this name exists")
    RUN_PROTECTED = (_Code.FAILED_PRECONDITION, False, "a trainer's own run cannot be deleted")
    RUN_LIMIT_REACHED = (_Code.RESOURCE_EXHAUSTED, False, "the trainer holds as many runs as it may")
    STEP_OUT_OF_ORDER = (_Code.FAILED_PRECONDITION, False, "the batch is not for the run's next step")
    BATCH_DIGEST_MISMATCH = (_Code.DATA_LOSS, True, "the tensors that arrived are not those the header names")
    BATCH_CONFLICT = (_Code.ALREADY_EXISTS, False, "another batch was accepted for this step")
    REVISION_EXPIRED = (_Code.OUT_OF_RANGE, False, "the history no longer reaches back to this revision")
    STEP_FAILED = (_Code.INTERNAL, False, "a training step raised; the weights are those of the step before")
    CHECKPOINT_FAILED = (_Code.INTERNAL, True, "a checkpoint could not be written")
    STALE_EPOCH = (_Code.FAILED_PRECONDITION, False, "a newer trainer of this run has taken over")
    VERSION_CONFLICT = (_Code.ALREADY_EXISTS, False, "this version exists with other content")
    UNKNOWN_VERSION = (_Code.NOT_FOUND, False, "the hub has no such version or artifact")
    VERSION_NOT_SEALED = (_Code.FAILED_PRECONDITION, False, "the version is not sealed")
    VERSION_SUPERSEDED = (_Code.FAILED_PRECONDITION, False, "a newer version is committed")
    VERSION_DECIDED = (_Code.FAILED_PRECONDITION, False, "the commit is decided and can no longer be aborted")
    CHUNK_CORRUPT = (_Code.DATA_LOSS, True, "a chunk does not match its checksum")
    DIGEST_MISMATCH = (_Code.DATA_LOSS, True, "assembled bytes do not match the digest in the manifest")
    CHUNKS_MISSING = (_Code.FAILED_PRECONDITION, True, "chunks of the version have not arrived")
    LAYOUT_MISMATCH = (_Code.FAILED_PRECONDITION, False, "the version's tensors do not fit the engine's model")
    OUT_OF_MEMORY = (_Code.RESOURCE_EXHAUSTED, False, "the engine's device has too little memory for the version")
    GROUP_BROKEN = (_Code.UNAVAILABLE, True, "a group for the nccl transport did not meet, or lost a member")
    LEASE_EXPIRED = (_Code.NOT_FOUND, True, "the agent's lease is unknown or expired; register again")
    ENGINES_NOT_READY = (_Code.DEADLINE_EXCEEDED, True, "too few engines prepared the version in time")
    NOT_SUPPORTED = (_Code.UNIMPLEMENTED, False, "this server does not offer what was asked")
    CONTRACT_MISMATCH = (_Code.FAILED_PRECONDITION, False, "the peers speak different contract versions")
    RUN_SUSPENDED = (_Code.FAILED_PRECONDITION, True, "the run is suspended and takes no work until it is resumed")
    NO_ROOM_FOR_RUN = (_Code.RESOURCE_EXHAUSTED, False, "no memory is left for another run or adapter")
    UNREACHABLE = (_Code.UNAVAILABLE, True, "no connection to the server")
    INTERNAL = (_Code.INTERNAL, False, "the server met a defect; its log has the traceback")
    UNAUTHENTICATED = (
        _Code.UNAUTHENTICATED,
        False,
        "the caller did not say who it is, or its credential does not count",
    )
    PERMISSION_DENIED = (_Code.PERMISSION_DENIED, False, "the caller's role may not make this call")

    def __init__(self, code: grpc.StatusCode, retryable: bool, meaning: str) -> None:
        self.code = code
        self.retryable = retryable
        self.meaning = meaning


_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in _Code}

# What a status without our details means: it came from gRPC itself or from a peer that is not ours.
_REASON_BY_CODE: Mapping[grpc.StatusCode, Reason] = {
    _Code.CANCELLED: Reason.CANCELLED,
    _Code.INVALID_ARGUMENT: Reason.INVALID_REQUEST,
    _Code.DEADLINE_EXCEEDED: Reason.DEADLINE_PASSED,
    _Code.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
    _Code.UNIMPLEMENTED: Reason.NOT_SUPPORTED,
    _Code.UNAVAILABLE: Reason.UNREACHABLE,
    _Code.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    _Code.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
}


@dataclass(frozen=True)
class FieldViolation:
    """A bad field's path, and what to change."""

    field: str
    description: str


class MeshError(Exception):
    """All that services raise and clients see."""

    def __init__(
        self,
        reason: Reason,
        message: str = "",
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.reason = reason
        self.message = message or reason.meaning
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.metadata: Mapping[str, str] = dict(metadata or {})
        super().__init__(self.message)

    @property
    def retryable(self) -> bool:
        return self.reason.retryable

    def __str__(self) -> str:
        fields = "".join(f"; {violation.field}: {violation.description}" for violation in self.violations)
        return f"{self.reason.name}: {self.message}{fields}"

    def __reduce__(self) -> tuple[object, ...]:
        rebuilt = partial(
            MeshError, violations=self.violations, retry_after_s=self.retry_after_s, metadata=dict(self.metadata)
        )
        return rebuilt, (self.reason, self.message)


def invalid(violations: Sequence[FieldViolation], what: str = "the request") -> MeshError:
    plural = "field is" if len(violations) == 1 else "fields are"
    return MeshError(Reason.INVALID_REQUEST, f"{len(violations)} {plural} wrong in {what}", violations=violations)


def to_rpc_status(error: MeshError) -> status_pb2.Status:
    """ErrorInfo, and BadRequest and RetryInfo where they apply; texts too long for gRPC metadata are cut."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN)
    for key, value in list(error.metadata.items())[:_MAX_METADATA_ENTRIES]:
        info.metadata[_cut(key, _MAX_FIELD_BYTES)] = _cut(value, _MAX_METADATA_BYTES)
    details: list[message.Message] = [info]
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        shown = list(error.violations[:_MAX_VIOLATIONS])
        if left := len(error.violations) - len(shown):
            shown.append(FieldViolation("", f"and {left} more"))
        for violation in shown:
            bad_request.field_violations.add(
                field=_cut(violation.field, _MAX_FIELD_BYTES),
                description=_cut(violation.description, _MAX_DESCRIPTION_BYTES),
            )
        details.append(bad_request)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(max(error.retry_after_s, 0.0) * 1e9))
        details.append(retry)
    status = status_pb2.Status(code=error.reason.code.value[0], message=_cut(error.message, _MAX_MESSAGE_BYTES))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_rpc_status(status: status_pb2.Status) -> MeshError:
    """Maps a foreign status by its code."""
    info: error_details_pb2.ErrorInfo | None = None
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations += [FieldViolation(item.field, item.description) for item in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    metadata = dict(info.metadata) if info is not None else {}
    reason = Reason.__members__.get(info.reason) if info is not None and info.domain == DOMAIN else None
    if reason is None:
        if info is not None and info.reason:
            metadata["peer_reason"] = info.reason
        reason = _REASON_BY_CODE.get(_CODE_BY_NUMBER.get(status.code, _Code.UNKNOWN), Reason.INTERNAL)
    return MeshError(reason, status.message, violations=violations, retry_after_s=retry_after_s, metadata=metadata)


def from_rpc_error(
    error: grpc.aio.AioRpcError, *, call: str = "the call", deadline_s: float | None = None
) -> MeshError:
    """Of a servicer or of gRPC itself, whose own errors get the names in `call` and `deadline_s`."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
                return from_rpc_status(status)
            except message.DecodeError:  # details of another origin: the bare code still says enough
                break
    if error.code() is _Code.INTERNAL and error.details() == _WRITE_FAILED:
        return MeshError(Reason.UNREACHABLE, "the server ended the call while a message was being sent")
    reason = _REASON_BY_CODE.get(error.code(), Reason.INTERNAL)
    return MeshError(reason, _said_by_grpc(error, call, deadline_s))


def _said_by_grpc(error: grpc.aio.AioRpcError, call: str, deadline_s: float | None) -> str:
    details = error.details() or ""
    if error.code() is _Code.CANCELLED and details == _LOCALLY_CANCELLED:
        return f"{call} was cancelled on this side"
    if error.code() is _Code.CANCELLED and details in _BARE_CANCELLATIONS:
        return f"{call} was ended by the server, which gave no reason; it may have stopped"
    if error.code() is _Code.DEADLINE_EXCEEDED and details in _BARE_DEADLINES:
        within = "its deadline" if deadline_s is None else f"its deadline of {deadline_s:g} s"
        return f"{call} was not answered within {within}"
    return details or f"{call} ended with {error.code().name}"


def _cut(text: str, most_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return encoded[: most_bytes - 3].decode(errors="ignore") + "..."
