"""The journal of a run: its ledger, batches and totals, kept on disk so that any process can continue from them.

A batch is submitted only when it and its rollouts are on disk; payloads go when their step is durable and recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.checkpoint_state import write_state
from meshrl.orchestrator.ledger.rows import StepRecord
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.work.batches import AssembledBatch
from meshrl.orchestrator.work.screening import DropReason, RunTotals
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.sampling.retry import RunError
from meshrl.wire import convert
from meshrl.wire.trace import trace_id_of
from meshrl.wire.types import Batch, Rollout, RolloutEvent, RolloutFailure

FLUSH_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where a run goes on, or begins. `recorded`: the last step with a batch; `logged`: the last with a record."""

    recorded: int
    logged: int
    unlogged_from: int
    """The first step that still needs its record."""
    evaluated: int = 0
    """The last step whose evaluation has its record; later ones are still owed."""
    progress: RunTotals = field(default_factory=RunTotals)
    """Totals up to the trainer's step."""
    records: Mapping[int, StepRecord]
    ready: tuple[RolloutGroup, ...] = ()
    redispatch: tuple[GroupTicket, ...] = ()
    carried: Mapping[str, tuple[Rollout, ...]] = field(default_factory=dict)
    """Finished rollouts of the groups to dispatch again, by the group that was cut off."""
    drawn: Mapping[str, int]
    next_sequence: int = 0
    algorithms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Their state after the trainer's step, if no step's record has it."""


class Journal:
    """With `checkpoints` a trainer that restarts goes back to its last durable step; then, or with `saves_last`, it
    saves the last step."""

    def __init__(
        self,
        ledger: Ledger,
        store: LedgerStore,
        start: StartingPoint,
        *,
        layout: Layout,
        durable: int,
        checkpoints: bool,
        saves_last: bool = False,
    ) -> None:
        self.starting_point = start
        self.ledger = ledger
        self._store = store
        self._layout = layout
        self._checkpoints = checkpoints
        self._saves_last = checkpoints or saves_last
        self._began_durable = durable
        self._durable = durable
        self._stated = durable
        self._logged = start.logged
        self._finished = start.unlogged_from - 1  # goes back with the trainer, as the last record does not
        self._forgotten = 0
        self._records = dict(start.records)
        self._forget()  # an earlier process may have been killed just before it did

    # --- rollouts ---------------------------------------------------------------------------------

    def dispatch(self, ticket: GroupTicket) -> None:
        """Its own row comes last: a known group has all its rollouts."""
        self.ledger.dispatch(ticket)
        self._store.dispatched(ticket)

    def record_event(self, ticket: GroupTicket, event: RolloutEvent) -> None:
        if isinstance(event, Rollout):
            self._store.keep(event)
            trace_id = trace_id_of(event.traceparent)
            self.ledger.finish(ticket, event.rollout_id, event.oldest_version, trace_id)
        elif isinstance(event, RolloutFailure):
            self.ledger.fail(ticket.group_id, event.rollout_id, event.reason, trace_id_of(event.traceparent))

    def close_group(self, group: RolloutGroup, *, cancelled_for: str) -> None:
        """A group is over; its rollouts of an earlier process join it."""
        self.ledger.close_group(
            group.ticket.group_id, cancelled=group.cancelled, cancelled_for=cancelled_for, reason=group.cut_short
        )
        self._store.over(group)
        group.carry(self.starting_point.carried.get(group.ticket.replaces, ()))

    def drop(self, rollout_id: str, reason: DropReason) -> None:
        self.ledger.drop(rollout_id, reason.value)

    # --- steps ------------------------------------------------------------------------------------

    async def batch(
        self, groups: Sequence[RolloutGroup], assembled: AssembledBatch, *, drawn: Mapping[str, int]
    ) -> None:
        """Returns when all of it is on disk. Raises RunError when it cannot be written."""
        step, rows = assembled.batch.step, assembled.batch.micro_batches
        before = self._records[step - 1].progress if step - 1 in self._records else self.starting_point.progress
        record = StepRecord(
            step=step,
            digest=await asyncio.to_thread(convert.batch_digest, assembled.batch),
            groups=tuple((group.ticket.group_id, tuple(r.rollout_id for r in group.kept)) for group in groups),
            advantages=assembled.advantages,
            untrainable=tuple(sorted(assembled.untrainable)),
            truncated_samples=assembled.truncated_samples,
            dropped_samples=assembled.dropped_samples,
            longest_row=max(len(row.token_ids) for row in rows),
            dp_size=assembled.dp_size,
            progress=before.plus(groups),
            drawn=drawn,
            algorithms=assembled.algorithms,
        )
        for rollout_id in record.untrainable:
            self.drop(rollout_id, DropReason.UNTRAINABLE)
        self.ledger.batch([one for one in assembled.advantages if one not in assembled.untrainable], step)
        self._store.batched(record, assembled.batch)
        self._records[step] = record
        try:
            async with asyncio.timeout(FLUSH_DEADLINE_S):
                await asyncio.wrap_future(self._store.flush())
        except TimeoutError:
            raise RunError(
                f"ledger {self._layout.ledger} was not written within {FLUSH_DEADLINE_S:g} s; is its disk full or slow?"
            ) from None

    def release(self, step: int, *, damaged: Iterable[str]) -> None:
        """Takes the batch of a step apart: its rollouts but the damaged wait for another step."""
        self._store.released(step)
        self.ledger.release(step)
        for rollout_id in damaged:
            self.drop(rollout_id, DropReason.DAMAGED)
        del self._records[step]

    def progress(self, step: int) -> RunTotals:
        return self._records[step].progress

    def algorithms(self, step: int) -> Mapping[str, Mapping[str, float]]:
        record = self._records.get(step)
        return self.starting_point.algorithms if record is None else record.algorithms

    def redone(self, step: int) -> bool:
        return step <= self._logged

    def logged(self, step: int, *, forgotten: bool = False) -> None:
        """`forgotten`: the trainer restarted before this step meanwhile."""
        self._logged = max(self._logged, step)
        if not forgotten:
            self._finished = step
        self._forget()

    def durable(self, step: int) -> None:
        if step > self._durable:
            self._durable = step
            self._forget()

    def go_back(self, step: int, done: int) -> None:
        """The trainer restarted at `step` and repeats those up to `done`. Raises RunError when it cannot."""
        gone = [lost for lost in range(step + 1, done + 1) if lost <= self._forgotten or lost not in self._records]
        if gone:
            raise RunError(
                f"the trainer restarted at step {step}, but the batch of step {gone[0]} is no longer kept: it was done"
                " and no checkpoint was expected; set ckpt.interval (orchestrator.checkpoint_interval where the"
                " orchestrator is started on its own)"
            )
        self._finished = min(self._finished, step)
        for again in range(step + 1, done + 1):
            self.ledger.undo(again)

    def _forget(self) -> None:
        waits_for_checkpoints = self._checkpoints or self._durable > self._began_durable
        upto = min(self._finished, self._durable) if waits_for_checkpoints else self._finished
        if upto > self._forgotten:
            self._store.forget(upto)
            self.ledger.make_final(upto)
            self._forgotten = upto

    async def state_checkpoint(self, last_step: int | None = None) -> None:
        """Writes the orchestrator's part of the newest durable checkpoint, and that of the last step ahead: the trainer
        saves it after its watchers have gone."""
        step = last_step if last_step is not None and self._saves_last else self._durable
        if step > self._stated and step in self._records:
            self._stated = step
            await asyncio.to_thread(write_state, self._layout, self._records[step])
        floor = min(self._forgotten, self._stated if self._checkpoints else self._forgotten)
        for old in [known for known in self._records if known < floor - 1]:
            del self._records[old]

    # --- reading back -----------------------------------------------------------------------------

    async def load_batch(self, step: int) -> Batch:
        """Raises RunError when it is not kept, or damaged."""
        batch = await asyncio.to_thread(self._store.batch, self._records[step])
        if batch is None:
            raise RunError(
                f"the batch of step {step} in {self._layout.ledger} is damaged or gone; start the orchestrator again:"
                " what the batch took goes into another one"
            )
        return batch

    async def load_step(self, step: int) -> tuple[tuple[RolloutGroup, ...], AssembledBatch]:
        """The groups, with the rollouts that are kept, and the batch of a step."""
        record = self._records[step]
        batch = await self.load_batch(step)
        found = await asyncio.to_thread(self._store.rollouts, [one for _, kept in record.groups for one in kept])
        known = await asyncio.to_thread(self._store.groups, [group_id for group_id, _ in record.groups])
        groups = []
        for group_id, rollout_ids in record.groups:
            group = known[group_id]
            group.kept = tuple(found[one] for one in rollout_ids if one in found)
            group.rollouts = list(group.kept)
            groups.append(group)
        assembled = AssembledBatch(
            batch=batch,
            advantages=record.advantages,
            untrainable=frozenset(record.untrainable),
            truncated_samples=record.truncated_samples,
            dropped_samples=record.dropped_samples,
            dp_size=record.dp_size,
        )
        return tuple(groups), assembled

    # --- the end ------------------------------------------------------------------------------------

    def end(self) -> None:
        self.ledger.end(DropReason.RUN_ENDED.value)
        self._store.end(DropReason.RUN_ENDED.value)

    def close(self) -> None:
        """Blocks until everything is on disk. Raises LedgerFileError."""
        self._store.close()
