"""Checks of every service: health, contract version, limits and errors.

Each call changes nothing, or must be refused first.
"""

from __future__ import annotations

import uuid
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from meshrl.v1 import rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import DOMAIN, Reason
from meshrl.wire.types import CONTRACT_VERSION
from meshrl.wire.validate import at_least
from meshrl_conformance.probe import NotCheckedError, Probe, RefusedError, RuleBrokenError, checks, must

UNKNOWN_FIELD = 15_000
PADDING_BYTES = 5 * 2**20  # beyond what gRPC takes where nobody says otherwise
MAX_DETAILS_BYTES = 8 * 2**10
FAR_VERSION = 2**62
BOOKMARK_S = 0.2
_SERVING = health_pb2.HealthCheckResponse.SERVING
# With these gRPC ends calls itself, without details.
_CODES_OF_GRPC = ("CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED")


def first_call(service: str, version: str, *, sound: bool = False) -> tuple[str, Message]:
    """That carries the contract version both ways. A hub must refuse it unless `sound`."""
    if service == "rollout":
        return "ListEnvironments", rollout_pb2.ListEnvironmentsRequest(contract_version=version)
    if service == "trainer":
        return "GetTrainer", trainer_pb2.GetTrainerRequest(contract_version=version)
    request = weights_pb2.RegisterRequest(
        contract_version=version,
        engine_id="conformance",
        url="http://127.0.0.1:1" if sound else "",
        engine_pool="conformance",
        transports=[weights_pb2.TRANSPORT_STREAM],
        layout_signature=b"conformance",
    )
    return "Register", request


def look(service: str) -> tuple[str, Message]:
    """A call that only looks."""
    if service == "rollout":
        return "ListEnvironments", rollout_pb2.ListEnvironmentsRequest()
    if service == "trainer":
        return "ListRuns", trainer_pb2.ListRunsRequest()
    return "ListEngines", weights_pb2.ListEnginesRequest()


def wrong_call(service: str, name: str) -> tuple[str, Message, str]:
    """With `name` as an identifier, harmless with any; and the identifier's path."""
    own = str(uuid.uuid4())
    if service == "rollout":
        asked = rollout_pb2.RunRolloutsRequest(
            request_id=own, group_id=name, environment="conformance", task_index=0, group_size=1, deadline_s=1.0,
            min_version=FAR_VERSION,
        )  # fmt: skip
        return "RunRollouts", asked, "group_id"
    if service == "trainer":
        return "DeleteRun", trainer_pb2.DeleteRunRequest(request_id=own, run_id=name), "run_id"
    aborted = weights_pb2.AbortVersionRequest(request_id=own, run_id=name, epoch=1, version=FAR_VERSION)
    return "AbortVersion", aborted, "run_id"


async def _health(probe: Probe, name: str) -> None:
    try:
        asked = health_pb2.HealthCheckRequest(service=name)
        reply = await probe.health.Check(asked, timeout=probe.deadline_s, metadata=probe.credentials.metadata())
    except grpc.aio.AioRpcError as error:
        raise RuleBrokenError(f"Health/Check of {name!r} ended with {error.code().name}: {error.details()}") from error
    said = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    must(reply.status == _SERVING, f"Health/Check of {name!r} says {said}")


@checks("health.service")
async def _health_service(probe: Probe) -> None:
    await _health(probe, probe.full_name)


@checks("health.server")
async def _health_server(probe: Probe) -> None:
    await _health(probe, "")


@checks("health.watch")
async def _health_watch(probe: Probe) -> None:
    asked = health_pb2.HealthCheckRequest(service=probe.full_name)
    watch = probe.health.Watch(asked, timeout=probe.deadline_s, metadata=probe.credentials.metadata())
    try:
        first = await watch.read()
    except grpc.aio.AioRpcError as error:
        raise RuleBrokenError(f"Health/Watch ended with {error.code().name}: {error.details()}") from error
    finally:
        watch.cancel()
    must(first is not grpc.aio.EOF and first.status == _SERVING, "Health/Watch does not begin with SERVING")


@checks("contract.version")
async def _contract_version(probe: Probe) -> None:
    if probe.service == "weights" and not probe.full:
        raise NotCheckedError("a hub tells its version to an engine that registers: --full")
    (answer,) = await _asked(probe, CONTRACT_VERSION)
    parts = answer.contract_version.split(".")
    is_version = len(parts) == 2 and all(part.isdigit() for part in parts)
    must(is_version and parts[0] == CONTRACT_VERSION.split(".")[0], f"the server says {answer.contract_version!r}")


@checks("contract.major")
async def _contract_major(probe: Probe) -> None:
    method, request = first_call(probe.service, "9.0", sound=probe.full)
    try:
        await probe.refused(method, request, reason=Reason.CONTRACT_MISMATCH)
    except RuleBrokenError:
        looked_first = probe.refusals and probe.refusals[-1].code is grpc.StatusCode.INVALID_ARGUMENT
        if probe.service == "weights" and not probe.full and looked_first:
            raise NotCheckedError("the hub looks at other fields first; --full registers an engine") from None
        raise


@checks("contract.minor")
async def _contract_minor(probe: Probe) -> None:
    for version in ("1.99", ""):
        try:
            await _asked(probe, version)
        except RefusedError as refusal:
            refused_url = probe.service == "weights" and refusal.code is grpc.StatusCode.INVALID_ARGUMENT
            must(refused_url, f"with version {version!r}, {refusal}")


async def _asked(probe: Probe, version: str) -> list[Any]:
    method, request = first_call(probe.service, version, sound=probe.full)
    return await probe.call(method, request)


async def since_1_1(probe: Probe) -> None:
    """Raises NotCheckedError for an earlier contract."""
    (answer,) = await _asked(probe, CONTRACT_VERSION)
    if not at_least(answer.contract_version, "1.1"):
        raise NotCheckedError(f"the server's contract is {answer.contract_version or 'not stated'}, before 1.1")


async def bookmarks(probe: Probe, method: str, request: Any) -> list[Any]:
    """A watch's first two messages from now on; in silence these are bookmarks."""
    await since_1_1(probe)
    request.from_now, request.bookmark_s = True, BOOKMARK_S
    messages = await probe.call(method, request, until=lambda messages: len(messages) == 2)
    must(messages[0].bookmark, f"{method} from now on does not begin with a bookmark")
    revisions = [message.revision for message in messages]
    must(revisions == sorted(revisions), f"the revisions of {method} are {revisions}")
    must(revisions[0] < revisions[1] or messages[1].bookmark, f"{method} sends revision {revisions[0]} again")
    return messages


@checks("contract.unknown-fields")
async def _unknown_fields(probe: Probe) -> None:
    await _padded(probe, 3, "a field that it does not know")


@checks("limits.message")
async def _message_limit(probe: Probe) -> None:
    size = PADDING_BYTES
    if probe.service == "trainer":
        (told,) = await probe.call("GetTrainer", trainer_pb2.GetTrainerRequest())
        size = min(size, (told.max_message_bytes or size) - 64)
    await _padded(probe, size, f"a message of {size} bytes")


async def _padded(probe: Probe, size: int, what: str) -> None:
    """A look with an unknown field of `size` bytes."""
    method, request = look(probe.service)
    request.MergeFromString(_varint(UNKNOWN_FIELD << 3 | 2) + _varint(size) + bytes(size))
    try:
        await probe.call(method, request)
    except RefusedError as refusal:
        raise RuleBrokenError(f"with {what}, {refusal}") from refusal


@checks("limits.identifiers")
async def _identifiers(probe: Probe) -> None:
    for name in ("", "x" * 257):
        method, request, path = wrong_call(probe.service, name)
        await probe.invalid(method, request, fields=[path])


@checks("errors.fields")
async def _fields(probe: Probe) -> None:
    if probe.service == "rollout":
        await probe.invalid(
            "RunRollouts",
            rollout_pb2.RunRolloutsRequest(environment="conformance", min_version=FAR_VERSION),
            fields=["request_id", "group_id", "task", "group_size", "deadline_s"],
        )
    elif probe.service == "trainer":
        await probe.invalid("DeleteRun", trainer_pb2.DeleteRunRequest(), fields=["request_id", "run_id"])
    else:
        request = weights_pb2.SealVersionRequest(version=FAR_VERSION)
        await probe.invalid("SealVersion", request, fields=["request_id", "run_id", "epoch", "artifact_id"])
    refusal = probe.refusals[-1]
    must(refusal.status is None or bool(refusal.fields), f"{refusal}; it has no BadRequest")


@checks("errors.size")
async def _size(probe: Probe) -> None:
    method, request, _ = wrong_call(probe.service, "\N{SNOWMAN}" * 20_000)
    try:
        await probe.call(method, request)
    except RefusedError as refusal:
        found = f"the details of {method}'s error have {refusal.details_bytes} bytes, its text {len(refusal.text)}"
        encoded = max(refusal.details_bytes, len(refusal.text.encode())) * 4 // 3
        must(encoded < MAX_DETAILS_BYTES, found)


@checks("errors.details")
async def _details(probe: Probe) -> None:
    must(bool(probe.refusals), "no call was refused")
    for refusal in probe.refusals:
        if refusal.code.name in _CODES_OF_GRPC and refusal.status is None:
            continue
        info, status = refusal.info, refusal.status
        must(status is not None, f"{refusal}; it has no google.rpc.Status in grpc-status-details-bin")
        must(info is not None and info.domain == DOMAIN, f"{refusal}; it has no ErrorInfo of domain {DOMAIN}")
        assert info is not None
        assert status is not None
        must(info.reason in Reason.__members__, f"{refusal}; the catalogue has no such reason")
        wanted = Reason[info.reason].code
        must(refusal.code is wanted, f"{refusal}; {info.reason} belongs to {wanted.name}")
        must(status.code == wanted.value[0], f"{refusal}; its google.rpc.Status has code {status.code}")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
