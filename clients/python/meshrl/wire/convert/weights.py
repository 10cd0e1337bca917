"""Messages of WeightSync to dataclasses and back; manifests and chunks are in `manifests`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert.fields import optional
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
_VERSION_STATE_OF: Mapping[int, VersionState] = {number: value for value, number in _VERSION_STATES.items()}
_AGENT_STATE_OF: Mapping[int, AgentState] = {number: value for value, number in _AGENT_STATES.items()}
_POLICY_OF: Mapping[int, ActivationPolicy] = {number: value for value, number in _POLICIES.items()}


def _known_transports(numbers: Iterable[int]) -> tuple[Transport, ...]:
    return tuple(TRANSPORT_OF[number] for number in numbers if number in TRANSPORT_OF)


def registration_to_proto(registration: AgentRegistration, *, contract_version: str = "") -> pb.RegisterRequest:
    return pb.RegisterRequest(
        contract_version=contract_version,
        engine_id=registration.engine_id,
        url=registration.url,
        engine_pool=registration.engine_pool,
        transports=[TRANSPORTS[transport] for transport in registration.transports],
        layout_signature=registration.layout_signature,
        held_version=registration.held_version,
        held_root=registration.held_root,
        collective_ranks=registration.collective_ranks,
        collective_backend=registration.collective_backend,
        host=registration.host,
        can_sleep=registration.can_sleep,
    )


def registration_from_proto(message: pb.RegisterRequest) -> AgentRegistration:
    """Returns the registration without the transports that this program does not know."""
    return AgentRegistration(
        engine_id=message.engine_id,
        url=message.url,
        engine_pool=message.engine_pool,
        transports=_known_transports(message.transports),
        layout_signature=message.layout_signature,
        held_version=optional(message, "held_version"),
        held_root=message.held_root,
        collective_ranks=message.collective_ranks,
        collective_backend=message.collective_backend,
        host=message.host,
        can_sleep=message.can_sleep,
    )


def lease_to_proto(lease: Lease, *, contract_version: str = "") -> pb.RegisterResponse:
    return pb.RegisterResponse(
        contract_version=contract_version,
        lease_id=lease.lease_id,
        lease_s=lease.lease_s,
        max_chunk_bytes=lease.max_chunk_bytes,
        committed_version=lease.committed_version,
    )


def lease_from_proto(message: pb.RegisterResponse) -> Lease:
    return Lease(
        lease_id=message.lease_id,
        lease_s=message.lease_s,
        max_chunk_bytes=message.max_chunk_bytes,
        committed_version=optional(message, "committed_version"),
    )


def _fault_to_proto(fault: AgentFault | None) -> pb.AgentFault | None:
    return None if fault is None else pb.AgentFault(reason=fault.reason, message=fault.message)


def _fault_from_proto(message: pb.AgentFault | None) -> AgentFault | None:
    return None if message is None else AgentFault(reason=message.reason, message=message.message)


def _apply_to_proto(report: ApplyReport) -> pb.ApplyReport:
    return pb.ApplyReport(
        version=report.version,
        root=report.root,
        pause_s=report.pause_s,
        prepare_s=report.prepare_s,
        requests_kept=report.requests_kept,
    )


def _apply_from_proto(message: pb.ApplyReport) -> ApplyReport:
    return ApplyReport(
        version=message.version,
        root=message.root,
        pause_s=message.pause_s,
        prepare_s=message.prepare_s,
        requests_kept=message.requests_kept,
    )


def agent_report_to_proto(report: AgentReport) -> pb.SessionRequest:
    return pb.SessionRequest(
        lease_id=report.lease_id,
        state=_AGENT_STATES[report.state],
        serving_version=report.serving_version,
        target_version=report.target_version,
        fault=_fault_to_proto(report.fault),
        applied=None if report.applied is None else _apply_to_proto(report.applied),
        group_generation=report.group_generation,
        target_artifact_id=report.target_artifact_id,
        sleeping=report.sleeping,
        sleep_answered=report.sleep_answered,
    )


def agent_report_from_proto(message: pb.SessionRequest) -> AgentReport:
    """Returns the report; a state that this program does not know counts as JOINING, which vouches for nothing."""
    return AgentReport(
        lease_id=message.lease_id,
        state=_AGENT_STATE_OF.get(message.state, AgentState.JOINING),
        serving_version=optional(message, "serving_version"),
        target_version=optional(message, "target_version"),
        fault=_fault_from_proto(optional(message, "fault")),
        applied=_apply_from_proto(message.applied) if message.HasField("applied") else None,
        group_generation=optional(message, "group_generation"),
        target_artifact_id=message.target_artifact_id,
        sleeping=message.sleeping,
        sleep_answered=optional(message, "sleep_answered"),
    )


def agent_command_to_proto(command: AgentCommand) -> pb.SessionResponse:
    match command:
        case Prepare(version=version, artifact_id=artifact_id):
            return pb.SessionResponse(prepare=pb.Prepare(version=version, artifact_id=artifact_id))
        case Commit(version=version, artifact_id=artifact_id, hold=hold):
            return pb.SessionResponse(commit=pb.Commit(version=version, artifact_id=artifact_id, hold=hold))
        case Abort(version=version):
            return pb.SessionResponse(abort=pb.Abort(version=version))
        case Resume(version=version):
            return pb.SessionResponse(resume=pb.Resume(version=version))
        case DrainAgent():
            return pb.SessionResponse(drain=pb.DrainAgent())
        case JoinGroup():
            return pb.SessionResponse(
                join_group=pb.JoinGroup(
                    generation=command.generation,
                    store_address=command.store_address,
                    backend=command.backend,
                    num_senders=command.num_senders,
                    num_receivers=command.num_receivers,
                    first_receiver=command.first_receiver,
                    deadline_s=command.deadline_s,
                )
            )
        case Sleep(number=number):
            return pb.SessionResponse(sleep=pb.Sleep(number=number))


def agent_command_from_proto(message: pb.SessionResponse) -> AgentCommand | None:
    """Returns the command, or None for one that this program does not know."""
    match message.WhichOneof("command"):
        case "prepare":
            return Prepare(version=message.prepare.version, artifact_id=message.prepare.artifact_id)
        case "commit":
            commit = message.commit
            return Commit(version=commit.version, artifact_id=commit.artifact_id, hold=commit.hold)
        case "abort":
            return Abort(version=message.abort.version)
        case "resume":
            return Resume(version=message.resume.version)
        case "drain":
            return DrainAgent()
        case "join_group":
            group = message.join_group
            return JoinGroup(
                generation=group.generation,
                store_address=group.store_address,
                backend=group.backend,
                num_senders=group.num_senders,
                num_receivers=group.num_receivers,
                first_receiver=group.first_receiver,
                deadline_s=group.deadline_s,
            )
        case "sleep":
            return Sleep(number=message.sleep.number)
        case _:
            return None


def engine_info_to_proto(engine: EngineInfo) -> pb.EngineInfo:
    return pb.EngineInfo(
        engine_id=engine.engine_id,
        url=engine.url,
        engine_pool=engine.engine_pool,
        state=_AGENT_STATES[engine.state],
        serving_version=engine.serving_version,
        routable=engine.routable,
        last_seen_s=engine.last_seen_s,
        last_fault=_fault_to_proto(engine.last_fault),
        transports=[TRANSPORTS[transport] for transport in engine.transports],
        collective_ranks=engine.collective_ranks,
        collective_backend=engine.collective_backend,
        group_generation=engine.group_generation,
        host=engine.host,
        sleeping=engine.sleeping,
        can_sleep=engine.can_sleep,
    )


def engine_info_from_proto(message: pb.EngineInfo) -> EngineInfo:
    """Returns the engine; a state that this program does not know counts as JOINING."""
    return EngineInfo(
        engine_id=message.engine_id,
        url=message.url,
        engine_pool=message.engine_pool,
        state=_AGENT_STATE_OF.get(message.state, AgentState.JOINING),
        serving_version=optional(message, "serving_version"),
        routable=message.routable,
        last_seen_s=message.last_seen_s,
        last_fault=_fault_from_proto(optional(message, "last_fault")),
        transports=_known_transports(message.transports),
        collective_ranks=message.collective_ranks,
        collective_backend=message.collective_backend,
        group_generation=optional(message, "group_generation"),
        host=message.host,
        sleeping=message.sleeping,
        can_sleep=message.can_sleep,
    )


def sleep_outcome_to_proto(outcome: SleepOutcome) -> pb.SleepEnginesResponse:
    return pb.SleepEnginesResponse(asleep=outcome.asleep, awake=outcome.awake, seconds=outcome.seconds)


def sleep_outcome_from_proto(message: pb.SleepEnginesResponse) -> SleepOutcome:
    return SleepOutcome(asleep=message.asleep, awake=message.awake, seconds=message.seconds)


def opened_group_to_proto(group: OpenedGroup) -> pb.OpenGroupResponse:
    return pb.OpenGroupResponse(
        generation=group.generation,
        members=[
            pb.GroupMember(engine_id=m.engine_id, first_receiver=m.first_receiver, num_ranks=m.num_ranks)
            for m in group.members
        ],
    )


def opened_group_from_proto(message: pb.OpenGroupResponse) -> OpenedGroup:
    return OpenedGroup(
        generation=message.generation,
        members=tuple(
            GroupMember(engine_id=m.engine_id, first_receiver=m.first_receiver, num_ranks=m.num_ranks)
            for m in message.members
        ),
    )


def activation_policy_to_proto(policy: ActivationPolicy) -> pb.ActivationPolicy:
    return _POLICIES[policy]


def activation_policy_from_proto(number: int) -> ActivationPolicy:
    """Returns the policy; unset and unknown ones are rolling."""
    return _POLICY_OF.get(number, ActivationPolicy.ROLLING)


def version_info_to_proto(info: VersionInfo) -> pb.VersionInfo:
    return pb.VersionInfo(
        run_id=info.run_id,
        epoch=info.epoch,
        version=info.version,
        artifact_id=info.artifact_id,
        state=_VERSION_STATES[info.state],
        num_bytes=info.num_bytes,
        transport=TRANSPORTS[info.transport],
        traceparent=info.traceparent,
    )


def version_info_from_proto(message: pb.VersionInfo) -> VersionInfo:
    """Returns the version; raises CONTRACT_MISMATCH for a state or transport that this program does not know."""
    state, transport = _VERSION_STATE_OF.get(message.state), TRANSPORT_OF.get(message.transport)
    if state is None or transport is None:
        raise MeshError(
            Reason.CONTRACT_MISMATCH,
            f"version {message.version} has state {message.state} and transport {message.transport}, "
            "which this program does not know; update it to the hub's release",
        )
    return VersionInfo(
        run_id=message.run_id,
        epoch=message.epoch,
        version=message.version,
        artifact_id=message.artifact_id,
        state=state,
        num_bytes=message.num_bytes,
        transport=transport,
        traceparent=message.traceparent,
    )


def version_event_to_proto(event: VersionEvent) -> pb.WatchVersionsResponse:
    return pb.WatchVersionsResponse(revision=event.revision, version=version_info_to_proto(event.version))


def version_event_from_proto(message: pb.WatchVersionsResponse) -> VersionEvent | None:
    """Returns the event, or None for a state or transport that this program does not know."""
    if message.version.state not in _VERSION_STATE_OF or message.version.transport not in TRANSPORT_OF:
        return None
    return VersionEvent(revision=message.revision, version=version_info_from_proto(message.version))


def activation_to_proto(activation: Activation) -> pb.ActivateVersionResponse:
    return pb.ActivateVersionResponse(
        version=version_info_to_proto(activation.version),
        engines=[
            pb.EngineReport(engine_id=report.engine_id, applied=_apply_to_proto(report.applied))
            for report in activation.engines
        ],
        commit_s=activation.commit_s,
        lag_s=activation.lag_s,
    )


def activation_from_proto(message: pb.ActivateVersionResponse) -> Activation:
    return Activation(
        version=version_info_from_proto(message.version),
        engines=tuple(
            EngineReport(engine_id=report.engine_id, applied=_apply_from_proto(report.applied))
            for report in message.engines
        ),
        commit_s=message.commit_s,
        lag_s=message.lag_s,
    )
