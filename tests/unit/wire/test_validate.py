"""Requests are refused at the door, with every bad field in one answer."""

import pytest

from meshrl.v1 import rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire import validate
from meshrl.wire.errors import MeshError, Reason

ID = "0" * 64


def violated(check, message):
    with pytest.raises(MeshError) as refused:
        check(message)
    assert refused.value.reason is Reason.INVALID_REQUEST
    return [violation.field for violation in refused.value.violations]


def rollout_request(**changes):
    fields = {
        "request_id": "q",
        "group_id": "g",
        "environment": "e",
        "task_index": 0,
        "group_size": 1,
        "deadline_s": 1.0,
    }
    return rollout_pb2.RunRolloutsRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (validate.validate_rollout_request, rollout_request()),
        (
            validate.validate_batch_header,
            trainer_pb2.BatchHeader(step=1, digest=ID, num_micro_batches=1, loss_tokens=1, environments=["e"]),
        ),
        (validate.validate_run_request, trainer_pb2.CreateRunRequest(request_id="q", run_id="r")),
        (validate.validate_checkpoint_request, trainer_pb2.SaveCheckpointRequest(request_id="q")),
        (
            validate.validate_register_request,
            weights_pb2.RegisterRequest(
                contract_version="1.7", engine_id="e", url="http://x", transports=[2, 99], layout_signature=b"s"
            ),
        ),
        (
            validate.validate_seal_request,
            weights_pb2.SealVersionRequest(request_id="q", run_id="r", epoch=1, artifact_id=ID),
        ),
        (validate.validate_abort_request, weights_pb2.AbortVersionRequest(request_id="q", run_id="r", epoch=1)),
        (
            validate.validate_activate_request,
            weights_pb2.ActivateVersionRequest(request_id="q", run_id="r", prepare_deadline_s=1),
        ),
        (
            validate.validate_open_group_request,
            weights_pb2.OpenGroupRequest(
                request_id="q", run_id="r", epoch=1, store_address="h:1", backend="gloo", num_senders=1, deadline_s=1
            ),
        ),
        (
            validate.validate_fetch_request,
            weights_pb2.FetchRequest(artifact_id=ID, ranges=[weights_pb2.ByteRange(offset=0, length=1)]),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_well_formed_requests_pass(check, message):
    check(message)


@pytest.mark.parametrize(
    ("check", "message", "fields"),
    [
        (
            validate.validate_rollout_request,
            rollout_pb2.RunRolloutsRequest(deadline_s=float("nan")),
            ["request_id", "group_id", "environment", "task", "group_size", "deadline_s"],
        ),
        (validate.validate_run_request, trainer_pb2.DeleteRunRequest(), ["request_id", "run_id"]),
        (validate.validate_checkpoint_request, trainer_pb2.SaveCheckpointRequest(), ["request_id"]),
        (
            validate.validate_register_request,
            weights_pb2.RegisterRequest(url="x", transports=[99]),
            ["engine_id", "url", "transports", "layout_signature"],
        ),
        (
            validate.validate_seal_request,
            weights_pb2.SealVersionRequest(artifact_id="xyz"),
            ["request_id", "run_id", "epoch", "artifact_id"],
        ),
        (validate.validate_abort_request, weights_pb2.AbortVersionRequest(), ["request_id", "run_id", "epoch"]),
        (
            validate.validate_activate_request,
            weights_pb2.ActivateVersionRequest(prepare_deadline_s=float("inf")),
            ["request_id", "run_id", "prepare_deadline_s"],
        ),
        (
            validate.validate_register_request,
            weights_pb2.RegisterRequest(
                engine_id="e", url="http://x", transports=[3], layout_signature=b"s", collective_ranks=1
            ),
            ["collective_backend"],
        ),
        (
            validate.validate_open_group_request,
            weights_pb2.OpenGroupRequest(backend="mpi"),
            ["request_id", "run_id", "store_address", "epoch", "backend", "num_senders", "deadline_s"],
        ),
        (
            validate.validate_fetch_request,
            weights_pb2.FetchRequest(ranges=[weights_pb2.ByteRange()]),
            ["artifact_id", "ranges[0].length"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_bad_field_is_named(check, message, fields):
    assert violated(check, message) == fields


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_sampling_out_of_range_is_refused(sampling, field):
    message = rollout_request(sampling=rollout_pb2.Sampling(**sampling))
    assert violated(validate.validate_rollout_request, message) == [f"sampling.{field}"]


def test_the_ends_of_each_range_are_allowed():
    ends = rollout_pb2.Sampling(temperature=0, top_p=1, top_k=-1, min_p=0, max_tokens=1, seed=0)
    assert validate.validate_rollout_request(rollout_request(sampling=ends)) is None


def test_another_major_contract_version_is_refused():
    with pytest.raises(MeshError) as refused:
        validate.validate_contract_version("2.0")
    assert refused.value.reason is Reason.CONTRACT_MISMATCH
    assert refused.value.metadata == {"contract_version": "1.1"}
    validate.validate_contract_version("1.9")
    validate.validate_contract_version("")
