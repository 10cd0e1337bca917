"""Messages of WeightSync to dataclasses and back; manifests and chunks are in `manifests`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from google.protobuf.message import Message

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert.fields import from_message, optional, to_message
from meshrl.wire.convert.manifests import TRANSPORT_OF, TRANSPORTS
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    Abort,
    Activation,
    ActivationPolicy,
    AgentCommand,
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    Commit,
    DrainAgent,
    EngineInfo,
    EngineReport,
    GroupMember,
    JoinGroup,
    Lease,
    OpenedGroup,
    Prepare,
    Resume,
    Sleep,
    SleepOutcome,
    Transport,
    VersionEvent,
    VersionInfo,
    VersionState,
)

_VERSION_STATES: Mapping[VersionState, pb.VersionState] = {
    VersionState.STAGING: pb.VERSION_STATE_STAGING,
    VersionState.SEALED: pb.VERSION_STATE_SEALED,
    VersionState.COMMITTING: pb.VERSION_STATE_COMMITTING,
    VersionState.COMMITTED: pb.VERSION_STATE_COMMITTED,
    VersionState.RETIRED: pb.VERSION_STATE_RETIRED,
    VersionState.ABORTED: pb.VERSION_STATE_ABORTED,
}
_AGENT_STATES: Mapping[AgentState, pb.AgentState] = {
    AgentState.JOINING: pb.AGENT_STATE_JOINING,
    AgentState.SEEDING: pb.AGENT_STATE_SEEDING,
    AgentState.READY: pb.AGENT_STATE_READY,
    AgentState.FETCHING: pb.AGENT_STATE_FETCHING,
    AgentState.PREPARED: pb.AGENT_STATE_PREPARED,
    AgentState.APPLYING: pb.AGENT_STATE_APPLYING,
    AgentState.POISONED: pb.AGENT_STATE_POISONED,
}
_POLICIES: Mapping[ActivationPolicy, pb.ActivationPolicy] = {
    ActivationPolicy.GANG: pb.ACTIVATION_POLICY_GANG,
    ActivationPolicy.ROLLING: pb.ACTIVATION_POLICY_ROLLING,
}
_COMMANDS: Mapping[str, type[AgentCommand]] = {
    "prepare": Prepare,
    "commit": Commit,
    "abort": Abort,
    "resume": Resume,
    "drain": DrainAgent,
    "join_group": JoinGroup,
    "sleep": Sleep,
}
_COMMAND_MESSAGES: Mapping[type[AgentCommand], tuple[str, Callable[..., Message]]] = {
    kind: (field, getattr(pb, kind.__name__)) for field, kind in _COMMANDS.items()
}
_VERSION_STATE_OF: Mapping[int, VersionState] = {number: value for value, number in _VERSION_STATES.items()}
_AGENT_STATE_OF: Mapping[int, AgentState] = {number: value for value, number in _AGENT_STATES.items()}
_POLICY_OF: Mapping[int, ActivationPolicy] = {number: value for value, number in _POLICIES.items()}


def _known_transports(numbers: Iterable[int]) -> tuple[Transport, ...]:
    return tuple(TRANSPORT_OF[number] for number in numbers if number in TRANSPORT_OF)


def registration_to_proto(registration: AgentRegistration, *, contract_version: str = "") -> pb.RegisterRequest:
    transports = [TRANSPORTS[transport] for transport in registration.transports]
    return to_message(pb.RegisterRequest, registration, transports=transports, contract_version=contract_version)


def registration_from_proto(message: pb.RegisterRequest) -> AgentRegistration:
    """Returns the registration without the transports that this program does not know."""
    return from_message(AgentRegistration, message, transports=_known_transports(message.transports))


def lease_to_proto(lease: Lease, *, contract_version: str = "") -> pb.RegisterResponse:
    return to_message(pb.RegisterResponse, lease, contract_version=contract_version)


def lease_from_proto(message: pb.RegisterResponse) -> Lease:
    return from_message(Lease, message)


def _fault_to_proto(fault: AgentFault | None) -> pb.AgentFault | None:
    return None if fault is None else to_message(pb.AgentFault, fault)


def _fault_from_proto(message: pb.AgentFault | None) -> AgentFault | None:
    return None if message is None else from_message(AgentFault, message)


def agent_report_to_proto(report: AgentReport) -> pb.SessionRequest:
    return to_message(
        pb.SessionRequest,
        report,
        state=_AGENT_STATES[report.state],
        fault=_fault_to_proto(report.fault),
        applied=None if report.applied is None else to_message(pb.ApplyReport, report.applied),
    )


def agent_report_from_proto(message: pb.SessionRequest) -> AgentReport:
    """Returns the report; a state that this program does not know counts as JOINING, which vouches for nothing."""
    return from_message(
        AgentReport,
        message,
        state=_AGENT_STATE_OF.get(message.state, AgentState.JOINING),
        fault=_fault_from_proto(optional(message, "fault")),
        applied=from_message(ApplyReport, message.applied) if message.HasField("applied") else None,
    )


def agent_command_to_proto(command: AgentCommand) -> pb.SessionResponse:
    field, message = _COMMAND_MESSAGES[type(command)]
    response: Callable[..., pb.SessionResponse] = pb.SessionResponse
    return response(**{field: to_message(message, command)})


def agent_command_from_proto(message: pb.SessionResponse) -> AgentCommand | None:
    """Returns the command, or None for one that this program does not know."""
    field = message.WhichOneof("command")
    kind = None if field is None else _COMMANDS.get(field)
    return None if field is None or kind is None else from_message(kind, getattr(message, field))


def engine_info_to_proto(engine: EngineInfo) -> pb.EngineInfo:
    return to_message(
        pb.EngineInfo,
        engine,
        state=_AGENT_STATES[engine.state],
        last_fault=_fault_to_proto(engine.last_fault),
        transports=[TRANSPORTS[transport] for transport in engine.transports],
    )


def engine_info_from_proto(message: pb.EngineInfo) -> EngineInfo:
    """Returns the engine; a state that this program does not know counts as JOINING."""
    return from_message(
        EngineInfo,
        message,
        state=_AGENT_STATE_OF.get(message.state, AgentState.JOINING),
        last_fault=_fault_from_proto(optional(message, "last_fault")),
        transports=_known_transports(message.transports),
    )


def sleep_outcome_to_proto(outcome: SleepOutcome) -> pb.SleepEnginesResponse:
    return to_message(pb.SleepEnginesResponse, outcome)


def sleep_outcome_from_proto(message: pb.SleepEnginesResponse) -> SleepOutcome:
    return from_message(SleepOutcome, message)


def opened_group_to_proto(group: OpenedGroup) -> pb.OpenGroupResponse:
    return to_message(
        pb.OpenGroupResponse, group, members=[to_message(pb.GroupMember, member) for member in group.members]
    )


def opened_group_from_proto(message: pb.OpenGroupResponse) -> OpenedGroup:
    return from_message(
        OpenedGroup, message, members=tuple(from_message(GroupMember, member) for member in message.members)
    )


def activation_policy_to_proto(policy: ActivationPolicy) -> pb.ActivationPolicy:
    return _POLICIES[policy]


def activation_policy_from_proto(number: int) -> ActivationPolicy:
    """Returns the policy; unset and unknown ones are rolling."""
    return _POLICY_OF.get(number, ActivationPolicy.ROLLING)


def version_info_to_proto(info: VersionInfo) -> pb.VersionInfo:
    return to_message(pb.VersionInfo, info, state=_VERSION_STATES[info.state], transport=TRANSPORTS[info.transport])


def version_info_from_proto(message: pb.VersionInfo) -> VersionInfo:
    """Returns the version; raises CONTRACT_MISMATCH for a state or transport that this program does not know."""
    state, transport = _VERSION_STATE_OF.get(message.state), TRANSPORT_OF.get(message.transport)
    if state is None or transport is None:
        raise MeshError(
            Reason.CONTRACT_MISMATCH,
            f"version {message.version} has state {message.state} and transport {message.transport}, "
            "which this program does not know; update it to the hub's release",
        )
    return from_message(VersionInfo, message, state=state, transport=transport)


def version_event_to_proto(event: VersionEvent) -> pb.WatchVersionsResponse:
    return pb.WatchVersionsResponse(revision=event.revision, version=version_info_to_proto(event.version))


def version_event_from_proto(message: pb.WatchVersionsResponse) -> VersionEvent | None:
    """Returns the event, or None for a state or transport that this program does not know."""
    if message.version.state not in _VERSION_STATE_OF or message.version.transport not in TRANSPORT_OF:
        return None
    return VersionEvent(revision=message.revision, version=version_info_from_proto(message.version))


def activation_to_proto(activation: Activation) -> pb.ActivateVersionResponse:
    return to_message(
        pb.ActivateVersionResponse,
        activation,
        version=version_info_to_proto(activation.version),
        engines=[
            to_message(pb.EngineReport, report, applied=to_message(pb.ApplyReport, report.applied))
            for report in activation.engines
        ],
    )


def activation_from_proto(message: pb.ActivateVersionResponse) -> Activation:
    return from_message(
        Activation,
        message,
        version=version_info_from_proto(message.version),
        engines=tuple(
            from_message(EngineReport, report, applied=from_message(ApplyReport, report.applied))
            for report in message.engines
        ),
    )
