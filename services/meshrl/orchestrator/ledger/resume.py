"""Plans how a run goes on after an earlier process, from its ledger and the trainer's step; no I/O.

A trainer at step k has trained every step up to k and nothing after. The batches after k are submitted again, unchanged
and in order, as far as they are kept and the trainer can take them. The groups of other later steps count as finished.
A group in flight is over: its finished rollouts stay, its missing ones are sampled again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from meshrl.orchestrator.ledger.rows import Past, RunRow
from meshrl.orchestrator.ledger.rules import Ledger, LedgerEntry, RolloutState
from meshrl.orchestrator.work.screening import DropReason
from meshrl.sampling.groups import GroupTicket


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The actions on the past, in this order of fields."""

    trained: tuple[int, ...] = ()
    """Steps that the trainer did unwatched."""
    again: tuple[int, ...] = ()
    """Steps whose batches are submitted again."""
    released: tuple[int, ...] = ()
    """Steps beyond the trainer's whose rollouts are finished again, for want of a batch."""
    interrupted: tuple[str, ...] = ()
    """Groups that were in flight."""
    dropped: tuple[tuple[str, DropReason], ...] = ()
    """Finished rollouts that nothing can be made of."""
    ready: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Groups with their remaining rollouts, in order of dispatch."""
    redispatch: tuple[GroupTicket, ...] = ()
    """Tickets for the missing rollouts of groups that were cut off."""
    carried: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Rollouts of those groups that came back."""
    unlogged: tuple[int, ...] = ()
    """Trained steps without a record."""


def goes_on(run: RunRow, *, run_id: str, session: str, epoch: int, trainer_step: int) -> bool:
    """Whether the last run of a folder goes on with this trainer: one that has trained (it is alive, or was resumed),
    is the process known from before, or was started by the same launch."""
    if run.run_id != run_id:
        return False
    return trainer_step > 0 or epoch == run.epoch or bool(session and session == run.session)


def plan_resume(
    past: Past,
    *,
    trainer_step: int,
    logged_step: int,
    dp_size: int,
    seq_len: int,
    environments: Mapping[str, int],
    last_step: int | None = None,
) -> ResumePlan:
    """Decides about everything that is open. The trainer takes batches made for `dp_size`, with rows of at most
    `seq_len` tokens. `environments`: the fewest rollouts of a group, by each environment of the run. The run ends
    with `last_step`, which may be earlier than before."""
    taken: dict[int, list[LedgerEntry]] = {}
    for entry in past.entries:
        if entry.state in (RolloutState.BATCHED, RolloutState.TRAINED) and entry.step is not None:
            taken.setdefault(entry.step, []).append(entry)
    again: list[int] = []
    step = trainer_step + 1
    last = math.inf if last_step is None else last_step
    while step <= last and step in taken and step in past.kept and (record := past.steps.get(step)) is not None:
        if record.dp_size != dp_size or record.longest_row > seq_len:
            break
        again.append(step)
        step += 1
    released = tuple(sorted(step for step in taken if step > trainer_step and step not in again))
    loose = [entry for entry in past.entries if entry.state is RolloutState.FINISHED]
    loose += [entry for step in released for entry in taken[step]]
    in_flight = {entry.group_id for entry in past.entries if entry.state is RolloutState.DISPATCHED}
    in_flight |= past.in_flight
    members, dropped = _members(past, loose, environments)
    tickets = _unfinished(past, loose, in_flight, environments)
    carried = tuple((group_id, members.pop(group_id)) for group_id in tickets if group_id in members)
    ready = {
        group_id: rollouts
        for group_id, rollouts in members.items()
        if len(rollouts) >= environments[past.groups[group_id].ticket.task.environment]
    }
    dropped += [(one, DropReason.GROUP_LOST) for known in members.keys() - ready for one in members[known]]
    logged = trainer_step  # before a step whose batch is damaged no record can be made
    while logged > logged_step and logged in past.kept and logged in past.steps:
        logged -= 1
    return ResumePlan(
        trained=tuple(sorted(step for step in taken if step <= trainer_step)),
        again=tuple(again),
        released=released,
        interrupted=tuple(sorted(in_flight)),
        dropped=tuple(dropped),
        ready=tuple(sorted(ready.items(), key=lambda item: past.groups[item[0]].ticket.sequence)),
        redispatch=tuple(sorted(tickets.values(), key=lambda ticket: (ticket.sequence, ticket.group_id))),
        carried=carried,
        unlogged=tuple(range(logged + 1, trainer_step + 1)),
    )


def _members(
    past: Past, loose: Sequence[LedgerEntry], environments: Collection[str]
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, DropReason]]]:
    members: dict[str, tuple[str, ...]] = {}
    dropped: list[tuple[str, DropReason]] = []
    for entry in loose:
        group_id = past.latest(entry.group_id)
        if entry.environment not in environments:
            dropped.append((entry.rollout_id, DropReason.REMOVED))
        elif entry.rollout_id in past.payloads and group_id in past.groups:
            members[group_id] = (*members.get(group_id, ()), entry.rollout_id)
        elif entry.rollout_id in past.damaged:
            dropped.append((entry.rollout_id, DropReason.DAMAGED))
        else:
            dropped.append((entry.rollout_id, DropReason.UNDONE))
    return members, dropped


def _unfinished(
    past: Past, loose: Sequence[LedgerEntry], in_flight: AbstractSet[str], environments: Collection[str]
) -> dict[str, GroupTicket]:
    """For the missing rollouts of the groups in flight, the failed ones too."""
    came_back = Counter(entry.group_id for entry in loose if entry.rollout_id not in past.damaged)
    tickets = {}
    for group_id in in_flight & past.groups.keys():
        ticket = past.groups[group_id].ticket
        missing = ticket.size - came_back[group_id]
        if missing > 0 and ticket.task.environment in environments:
            tickets[group_id] = ticket.for_missing(missing, reseeds=1 if came_back[group_id] else 0)
    return tickets


def restore(ledger: Ledger, past: Past, plan: ResumePlan) -> None:
    ledger.restore(past.entries, past.ended)
    for step in plan.trained:
        ledger.train(step)
    for step in plan.again:
        ledger.undo(step)
    for step in plan.released:
        ledger.release(step)
    for group_id in plan.interrupted:
        ledger.interrupt(group_id, DropReason.RESTARTED.value)
    for rollout_id, reason in plan.dropped:
        ledger.drop(rollout_id, reason.value)
