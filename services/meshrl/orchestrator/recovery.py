"""What becomes of the ledger of an earlier process: decided from what it left and where the trainer stands, no I/O.

A trainer at step k has trained every step up to k and nothing after. So what a step up to k took is trained; the
batches of k + 1 and after are submitted again, unchanged and in order, as far as they are kept and the trainer can
take them; what later steps took is finished again. Finished rollouts become groups again, in flight ones are over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from meshrl.orchestrator.groups import MIN_SURVIVORS, DropReason, GroupTicket
from meshrl.orchestrator.ledger import Entry, Ledger, RolloutState
from meshrl.orchestrator.ledger_rows import Past, RunRow, StepRecord


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What to do with what is left, in this order of fields."""

    trained: tuple[int, ...] = ()
    """Steps that the trainer did while nobody was told."""
    again: tuple[int, ...] = ()
    """Steps whose batches are submitted again."""
    released: tuple[int, ...] = ()
    """Steps beyond the trainer's whose batches are not: their rollouts are finished again."""
    interrupted: tuple[str, ...] = ()
    """Groups that were in flight."""
    dropped: tuple[tuple[str, DropReason], ...] = ()
    """Finished rollouts that nothing can be made of."""
    ready: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Groups with the rollouts that are left of them, in order of dispatch."""
    redispatch: tuple[GroupTicket, ...] = ()
    """Tickets of groups in flight of which too little came back: their tasks are sampled again."""
    unlogged: tuple[int, ...] = ()
    """Steps that are trained and have no record yet."""


def goes_on(run: RunRow, *, run_id: str, session: str, epoch: int, trainer_step: int) -> bool:
    """Whether the last run of a folder goes on with this trainer, or another one begins.

    It goes on with a trainer that has trained (it is alive, or was resumed), that is the process known from before, or
    that the same launch started. A trainer that starts from nothing begins a run of its own.
    """
    if run.run_id != run_id:
        return False
    return trainer_step > 0 or epoch == run.epoch or bool(session and session == run.session)


def settle(
    past: Past,
    *,
    trainer_step: int,
    logged_step: int,
    fits: Callable[[StepRecord], bool],
    environments: Collection[str],
) -> Settlement:
    """Decides about everything that is open.

    `fits` says whether the trainer can take a batch as it is, `environments` are those that the run trains on.
    """
    taken: dict[int, list[Entry]] = {}
    for entry in past.entries:
        if entry.state in (RolloutState.BATCHED, RolloutState.TRAINED) and entry.step is not None:
            taken.setdefault(entry.step, []).append(entry)
    again: list[int] = []
    step = trainer_step + 1
    while step in taken and step in past.kept and step in past.steps and fits(past.steps[step]):
        again.append(step)
        step += 1
    released = tuple(sorted(step for step in taken if step > trainer_step and step not in again))
    loose = [entry for entry in past.entries if entry.state is RolloutState.FINISHED]
    loose += [entry for step in released for entry in taken[step]]
    in_flight = {entry.group_id for entry in past.entries if entry.state is RolloutState.DISPATCHED}
    in_flight |= {group_id for group_id, known in past.groups.items() if not known.over}
    dropped, ready, redispatch = _groups(past, loose, in_flight, environments)
    return Settlement(
        trained=tuple(sorted(step for step in taken if step <= trainer_step)),
        again=tuple(again),
        released=released,
        interrupted=tuple(sorted(in_flight)),
        dropped=dropped,
        ready=ready,
        redispatch=redispatch,
        unlogged=tuple(sorted(step for step in past.kept & set(past.steps) if logged_step < step <= trainer_step)),
    )


def _groups(
    past: Past, loose: list[Entry], in_flight: set[str], environments: Collection[str]
) -> tuple[tuple[tuple[str, DropReason], ...], tuple[tuple[str, tuple[str, ...]], ...], tuple[GroupTicket, ...]]:
    """Finished rollouts by group: those to drop, the groups that are left, the tickets to sample again."""
    dropped: list[tuple[str, DropReason]] = []
    members: dict[str, list[str]] = {}
    for entry in loose:
        if entry.environment not in environments:
            dropped.append((entry.rollout_id, DropReason.REMOVED))
        elif entry.rollout_id in past.payloads and entry.group_id in past.groups:
            members.setdefault(entry.group_id, []).append(entry.rollout_id)
        else:
            dropped.append((entry.rollout_id, DropReason.UNDONE))
    ready: list[tuple[str, tuple[str, ...]]] = []
    for group_id, rollout_ids in members.items():
        if len(rollout_ids) >= MIN_SURVIVORS:
            ready.append((group_id, tuple(rollout_ids)))
        else:
            cut_off = group_id in in_flight
            reason = DropReason.RESTARTED if cut_off else DropReason.GROUP_LOST
            dropped += [(rollout_id, reason) for rollout_id in rollout_ids]
    alive = {group_id for group_id, _ in ready}
    tickets = (past.groups[group_id].group.ticket for group_id in in_flight - alive if group_id in past.groups)
    redispatch = [ticket for ticket in tickets if ticket.task.environment in environments]
    ready.sort(key=lambda item: past.groups[item[0]].group.ticket.sequence)
    return (
        tuple(dropped),
        tuple(ready),
        tuple(sorted(redispatch, key=lambda ticket: (ticket.sequence, ticket.group_id))),
    )


def restore(ledger: Ledger, past: Past, settlement: Settlement) -> None:
    """Brings the ledger to where the settlement says."""
    ledger.restore(past.entries, past.ended)
    for step in settlement.trained:
        ledger.train(step)
    for step in settlement.again:
        ledger.undo(step)
    for step in settlement.released:
        ledger.release(step)
    for group_id in settlement.interrupted:
        ledger.interrupt(group_id, DropReason.RESTARTED.value)
    for rollout_id, reason in settlement.dropped:
        ledger.drop(rollout_id, reason.value)


def rows_fit(record: StepRecord, *, dp_size: int, seq_len: int) -> bool:
    """Whether a trainer of this size takes the batch of a step as it is."""
    return record.dp_size == dp_size and record.longest_row <= seq_len
