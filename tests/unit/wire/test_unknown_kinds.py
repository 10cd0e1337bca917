"""What a later contract adds is left out, taken for the careful choice, or refused, never guessed."""

import pytest

from meshrl.v1 import rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire import convert
from meshrl.wire.errors import MeshError
from meshrl.wire.types import (
    ActivationPolicy,
    ActivationRequest,
    AgentRegistration,
    AgentReport,
    AgentState,
    EngineInfo,
    Manifest,
    Transport,
)


def test_unknown_events_and_commands_are_none():
    assert convert.rollout_event_from_proto(rollout_pb2.RunRolloutsResponse()) is None
    assert convert.step_event_from_proto(trainer_pb2.WatchStepsResponse(revision=1, state=99)) is None
    assert convert.agent_command_from_proto(weights_pb2.SessionResponse()) is None


def test_an_unknown_version_state_is_none_in_a_watch_and_an_error_in_an_answer():
    message = weights_pb2.VersionInfo(version=4, state=99, transport=weights_pb2.TRANSPORT_STREAM)
    assert convert.version_event_from_proto(weights_pb2.WatchVersionsResponse(version=message)) is None
    with pytest.raises(MeshError, match="CONTRACT_MISMATCH: version 4 has state 99"):
        convert.version_info_from_proto(message)


def test_an_unknown_agent_state_vouches_for_nothing():
    assert convert.from_proto(AgentReport, weights_pb2.SessionRequest(state=99)).state is AgentState.JOINING
    assert convert.from_proto(EngineInfo, weights_pb2.EngineInfo(state=99)).state is AgentState.JOINING


def test_unknown_transports_of_an_agent_are_left_out():
    message = weights_pb2.RegisterRequest(transports=[99, weights_pb2.TRANSPORT_STREAM])
    assert convert.from_proto(AgentRegistration, message).transports == (Transport.STREAM,)


def test_an_unknown_policy_is_rolling():
    for policy in (0, 99):
        message = weights_pb2.ActivateVersionRequest(policy=policy)
        assert convert.from_proto(ActivationRequest, message).policy is ActivationPolicy.ROLLING


def test_an_unknown_manifest_is_refused_with_every_field():
    message = weights_pb2.Manifest(kind=99, transport=98, tensors=[weights_pb2.TensorEntry(dtype=97)])
    with pytest.raises(MeshError) as refused:
        convert.from_proto(Manifest, message, "manifest")
    assert [violation.field for violation in refused.value.violations] == [
        "manifest.kind",
        "manifest.transport",
        "manifest.tensors[0].dtype",
    ]
