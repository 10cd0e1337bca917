"""The error catalogue survives the trip through google.rpc.Status."""

import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from meshrl.wire.errors import (
    DOMAIN,
    STATUS_DETAILS_KEY,
    FieldViolation,
    MeshError,
    Reason,
    from_rpc_error,
    from_rpc_status,
    invalid,
    to_rpc_status,
)


def _rpc_error(code, details="", trailing=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def test_every_reason_has_a_meaning_of_its_own():
    assert len({reason.meaning for reason in Reason}) == len(Reason.__members__)


def test_only_transient_reasons_are_retryable():
    assert Reason.OVERLOADED.retryable
    assert Reason.DRAINING.retryable
    assert not Reason.INVALID_REQUEST.retryable
    assert not Reason.STALE_EPOCH.retryable


def test_status_names_the_domain_and_the_code():
    status = to_rpc_status(MeshError(Reason.UNKNOWN_RUN, "no run a"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == (DOMAIN, "UNKNOWN_RUN")
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0]


def test_violations_arrive_in_order():
    violations = [FieldViolation("step", "must be at least 1"), FieldViolation("digest", "must not be empty")]
    back = from_rpc_status(to_rpc_status(invalid(violations, "the header")))
    assert back.violations == tuple(violations)
    assert str(back) == (
        "INVALID_REQUEST: 2 fields are wrong in the header; step: must be at least 1; digest: must not be empty"
    )


def test_long_texts_are_cut_to_fit_metadata():
    violations = [FieldViolation("f" * 500, "d" * 5000)] * 500
    error = MeshError(Reason.INVALID_REQUEST, "é" * 50_000, violations=violations, metadata={"k": "v" * 5000})
    status = to_rpc_status(error)
    assert status.ByteSize() < 5_600
    assert from_rpc_status(status).violations[-1].description == "and 480 more"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED),
        (grpc.StatusCode.CANCELLED, Reason.CANCELLED),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.NOT_SUPPORTED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MESSAGE_TOO_LARGE),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL),
    ],
)
def test_a_bare_status_is_mapped_by_its_code(code, reason):
    error = from_rpc_error(_rpc_error(code, "from grpc"))
    assert (error.reason, error.message) == (reason, "from grpc")


def test_a_bare_status_without_text_says_its_code():
    assert from_rpc_error(_rpc_error(grpc.StatusCode.UNAVAILABLE)).message == "the call ended with UNAVAILABLE"


def test_a_reason_of_a_newer_peer_falls_back_to_the_code():
    status = to_rpc_status(MeshError(Reason.OVERLOADED, "busy"))
    info = error_details_pb2.ErrorInfo(reason="INVENTED_LATER", domain=DOMAIN)
    status.details[0].Pack(info)
    status.code = grpc.StatusCode.UNAVAILABLE.value[0]
    back = from_rpc_status(status)
    assert back.reason is Reason.UNREACHABLE
    assert back.metadata["peer_reason"] == "INVENTED_LATER"


def test_a_status_of_another_domain_is_not_taken_for_ours():
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="elsewhere")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="UNKNOWN_RUN", domain="example.com"))
    assert from_rpc_status(status).reason is Reason.INTERNAL


def test_unreadable_details_leave_the_code():
    error = _rpc_error(grpc.StatusCode.UNAVAILABLE, "gone", [(STATUS_DETAILS_KEY, b"\xff\xff\xff")])
    assert from_rpc_error(error).reason is Reason.UNREACHABLE


def test_an_error_without_text_says_what_its_reason_means():
    assert MeshError(Reason.DRAINING).message == Reason.DRAINING.meaning


def test_an_error_can_cross_a_process_border():
    error = MeshError(Reason.OVERLOADED, "busy", violations=[FieldViolation("a", "b")], retry_after_s=2.0)
    back = pickle.loads(pickle.dumps(error))
    assert (back.reason, back.message, back.violations, back.retry_after_s) == (
        Reason.OVERLOADED,
        "busy",
        (FieldViolation("a", "b"),),
        2.0,
    )


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        ("CANCELLED", "CANCELLED", "the call was ended by the server, which gave no reason; it may have stopped"),
        ("CANCELLED", "Locally cancelled by application!", "the call was cancelled on this side"),
        ("CANCELLED", "client is going away", "client is going away"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "the call was not answered within its deadline"),
        ("DEADLINE_EXCEEDED", "no slot became free", "no slot became free"),
    ],
)
def test_what_grpc_itself_says_of_a_broken_call_becomes_a_sentence(code, details, said):
    assert from_rpc_error(_rpc_error(grpc.StatusCode[code], details)).message == said
