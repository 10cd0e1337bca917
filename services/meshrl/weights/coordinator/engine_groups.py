"""Groups of engines for the nccl transport: who is asked to join, who is in, and which versions they carry. No I/O.

The hub picks the engines and numbers their ranks; engines report the group's generation once they are in. A group
carries versions of its publisher's epoch, from `first_version` on: an engine that waited for an older version would
mistake the bytes of the next one for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshrl.weights.coordinator.states import EngineRecord, VersionRecord
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import GroupMember, JoinGroup, OpenedGroup, Transport

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class BroadcastRequest:
    """OpenGroupRequest of weights.proto."""

    request_id: str
    run_id: str
    epoch: int
    store_address: str
    backend: str
    num_senders: int
    engine_ids: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """A group that engines were asked to join, by `until_s`."""

    request: BroadcastRequest
    generation: int
    first_version: int
    until_s: float
    members: tuple[GroupMember, ...]

    def opened(self) -> OpenedGroup:
        return OpenedGroup(generation=self.generation, members=self.members)


class EngineGroups:
    """The current group: the one that was opened last."""

    def __init__(self) -> None:
        self.current: EngineGroup | None = None

    @property
    def generation(self) -> int:
        return 0 if self.current is None else self.current.generation

    def open(
        self, request: BroadcastRequest, engines: Collection[EngineRecord], first_version: int, now_s: float
    ) -> EngineGroup:
        """Makes a new group the current one. Raises GROUP_BROKEN when no engine can take part."""
        members: list[GroupMember] = []
        reasons: list[str] = []
        num_receivers = 0
        for engine in engines:
            reason = _why_left_out(engine, request)
            if reason is not None:
                reasons.append(f"{engine.engine_id} {reason}")
                continue
            ranks = engine.registration.collective_ranks
            members.append(GroupMember(engine_id=engine.engine_id, first_receiver=num_receivers, num_ranks=ranks))
            num_receivers += ranks
        if not members:
            why = "; ".join(reasons) or "no engine is registered; start one that points at this hub"
            raise MeshError(
                Reason.GROUP_BROKEN,
                f"no engine can join a group with backend {request.backend}: {why}",
                retry_after_s=RETRY_AFTER_S,
            )
        # Engines remember groups of a hub whose log was lost.
        newest = max(self.generation, *(engine.newest_generation for engine in engines))
        self.current = EngineGroup(
            request=request,
            generation=newest + 1,
            first_version=first_version,
            until_s=now_s + request.deadline_s,
            members=tuple(members),
        )
        return self.current

    def join(self, engine: EngineRecord, now_s: float) -> JoinGroup | None:
        """The command for an engine of the current group that has not got it on this session."""
        group = self.current
        if group is None or now_s >= group.until_s or group.generation in (engine.join_sent, engine.group_generation):
            return None
        member = next((m for m in group.members if m.engine_id == engine.engine_id), None)
        support = (engine.registration.collective_ranks, engine.registration.collective_backend)
        if member is None or support != (member.num_ranks, group.request.backend):
            return None
        return JoinGroup(
            generation=group.generation,
            store_address=group.request.store_address,
            backend=group.request.backend,
            num_senders=group.request.num_senders,
            num_receivers=sum(m.num_ranks for m in group.members),
            first_receiver=member.first_receiver,
            deadline_s=group.request.deadline_s,  # not what is left of it, so that a repetition is the same command
        )

    def unreachable(self, engines: Collection[EngineRecord], record: VersionRecord) -> dict[str, str]:
        reasons = {engine.engine_id: self.why_unreachable(engine, record) for engine in engines}
        return {engine_id: reason for engine_id, reason in reasons.items() if reason is not None}

    def why_unreachable(self, engine: EngineRecord, record: VersionRecord) -> str | None:
        """Why an engine cannot get a version now; None when it can.

        An engine of another layout needs no group: it is to prepare the version, and refuses it with the difference.
        """
        if record.transport not in engine.registration.transports:
            return f"it does not take transport {record.transport.value}"
        if record.transport is not Transport.NCCL or not engine.fits(record):
            return None
        if record.copied:
            return None
        group = self.current
        if group is None or engine.group_generation != group.generation:
            return f"it is not in group {self.generation}"
        carried = (group.request.run_id, group.request.epoch)
        if carried == (record.key.run_id, record.key.epoch) and record.version >= group.first_version:
            return None
        return f"group {group.generation} is for versions from {group.first_version} of epoch {group.request.epoch} on"


def _why_left_out(engine: EngineRecord, request: BroadcastRequest) -> str | None:
    if request.engine_ids and engine.engine_id not in request.engine_ids:
        return "was not asked for"
    if engine.engine_id in request.without:
        return "is left out"
    if Transport.NCCL not in engine.registration.transports or not engine.registration.collective_ranks:
        return "brings no ranks"
    if engine.registration.collective_backend != request.backend:
        return f"has backend {engine.registration.collective_backend}"
    return None if engine.connected else "has no session"
