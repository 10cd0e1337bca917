"""Opens the journal of a run: finds out whether the folder's last run goes on, and takes up its state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from loguru import logger

from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.checkpoint_state import read_state, state_path
from meshrl.orchestrator.ledger.journal import Journal, StartingPoint
from meshrl.orchestrator.ledger.resume import ResumePlan, goes_on, plan_resume, restore
from meshrl.orchestrator.ledger.rows import Past, RunRow
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.ledger.writer import LedgerWriter
from meshrl.sampling.retry import RunError
from meshrl.wire.growing_file import json_records, lines_from_the_end, whole_size
from meshrl.wire.types import Rollout, RunInfo, TrainerInfo


def open_journal(
    layout: Layout,
    trainer: TrainerInfo,
    run: RunInfo,
    *,
    session: str,
    least_rollouts: Mapping[str, int],
    checkpoints: bool,
    saves_last: bool = False,
    last_step: int | None = None,
    writer: LedgerWriter | None = None,
) -> Journal:
    """Blocks. Raises RunError when the ledger cannot be used. `least_rollouts` is by training environment; the trainer
    saves steps on the way (`checkpoints`), and the last one (`saves_last`), which is `last_step`."""
    size = end_whole(layout.metrics_jsonl)
    store = LedgerStore(layout.ledger, writer)
    ledger = Ledger(store.record)
    last = store.open()
    this = RunRow(
        run=0 if last is None else last.run,
        run_id=run.run_id,
        session=session,
        epoch=run.epoch,
        first_step=run.step + 1,
        metrics_offset=size,
    )
    if last is not None and goes_on(last, run_id=run.run_id, session=session, epoch=run.epoch, trainer_step=run.step):
        first_step = min(last.first_step, this.first_step)
        row = replace(this, first_step=first_step, metrics_offset=last.metrics_offset)
        past = store.resume(row, trainer_step=run.step)
        decide = partial(
            plan_resume,
            trainer_step=run.step,
            dp_size=trainer.dp_size,
            seq_len=trainer.seq_len,
            environments=least_rollouts,
            last_step=last_step,
        )
        start = _resume(layout, ledger, store, past, decide, step=run.step)
    else:
        store.begin(this)
        progress, drawn, algorithms = read_state(layout, run.step)
        start = StartingPoint(
            recorded=run.step,
            logged=run.step,
            unlogged_from=run.step + 1,
            evaluated=run.step,
            progress=progress,
            records={},
            drawn=drawn,
            next_sequence=sum(drawn.values()),
            algorithms=algorithms,
        )
    return Journal(
        ledger,
        store,
        start,
        layout=layout,
        durable=run.durable_step,
        checkpoints=checkpoints,
        saves_last=saves_last,
    )


def _resume(
    layout: Layout, ledger: Ledger, store: LedgerStore, past: Past, decide: Callable[..., ResumePlan], *, step: int
) -> StartingPoint:
    """Raises RunError when the totals are lost."""
    logged = last_logged_step(layout.metrics_jsonl, past.run.metrics_offset)
    past, plan, rollouts = _plan_without_damage(store, past, partial(decide, logged_step=logged))
    algorithms: Mapping[str, Mapping[str, float]] = {}
    if step in past.steps:
        progress, algorithms = past.steps[step].progress, past.steps[step].algorithms
        with suppress(RunError):  # the totals of a damaged file are those of the record
            if state_path(layout, step).exists() and (saved := read_state(layout, step)[0]) != progress:
                logger.warning(
                    f"the checkpoint of step {step} is not of this run, which has {progress.tokens} tokens by then,"
                    f" where the checkpoint has {saved.tokens}: it is of an earlier run in this folder, or of steps"
                    " that were undone, and its weights are what is trained on; --ckpt.resume-step names another"
                )
    elif step in past.damaged_steps and not state_path(layout, step).exists():
        raise RunError(
            f"the record of step {step} in {layout.ledger} is damaged, and nothing else has the run's totals; resume"
            " another step with --ckpt.resume-step, or move the ledger away and start again: totals count from 0 then"
        )
    else:
        progress, _, algorithms = read_state(layout, step)
    restore(ledger, past, plan)
    for group_id, members in plan.ready:
        past.groups[group_id].rollouts = [rollouts[one] for one in members]
    ready = tuple(past.groups[group_id] for group_id, _ in plan.ready)
    carried = {group_id: tuple(rollouts[one] for one in members) for group_id, members in plan.carried}
    renewed = {ticket.group_id for ticket in plan.redispatch}
    for group_id in plan.interrupted:
        if group_id in past.groups and group_id not in renewed:
            store.over(past.groups[group_id])
    logger.warning(
        f"going on with run {past.run.run_id!r} from {layout.ledger}: the trainer is at step {step};"
        f" {len(plan.again)} batches are submitted again, {len(ready)} groups wait for a step,"
        f" {len(plan.redispatch)} are completed"
    )
    if past.damaged or past.damaged_steps:
        logger.warning(
            f"damaged in {layout.ledger}: {len(past.damaged)} rollouts, which are dropped, and the batch or record of"
            f" steps {sorted(past.damaged_steps) or 'none'}; a step that is not trained gets another batch, one that is"
            " trained stays trained, but its line of metrics may be missing"
        )
    return StartingPoint(
        recorded=max(plan.again, default=step),
        logged=logged,
        unlogged_from=min(plan.unlogged, default=step + 1),
        evaluated=max(last_evaluated_step(layout.metrics_jsonl, past.run.metrics_offset), past.run.first_step - 1),
        progress=progress,
        records={known: one for known, one in past.steps.items() if known in past.kept or known == step},
        ready=ready,
        redispatch=plan.redispatch,
        carried=carried,
        drawn=past.drawn,
        next_sequence=past.next_sequence,
        algorithms=algorithms,
    )


def _plan_without_damage(
    store: LedgerStore, past: Past, decide: Callable[[Past], ResumePlan]
) -> tuple[Past, ResumePlan, dict[str, Rollout]]:
    while True:
        plan = decide(past)
        wanted = [one for _, members in (*plan.ready, *plan.carried) for one in members]
        rollouts = store.rollouts(wanted)
        lost = frozenset(wanted) - rollouts.keys()
        batches = (*plan.unlogged, *plan.again)
        unreadable = frozenset(step for step in batches if store.batch(past.steps[step]) is None)
        if not lost and not unreadable:
            return past, plan, rollouts
        past = past.without(lost, unreadable)


def end_whole(path: Path) -> int:
    """Cuts off a last line that a killed process left half written; returns the file's size then."""
    size = whole_size(path)
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
    return size


def last_logged_step(path: Path, offset: int) -> int:
    """The last step with a record after `offset`, or 0. Read from the end: records of repeated steps follow those of
    later steps, and have a flag."""
    for record in json_records(lines_from_the_end(path, offset)):
        if "time/step" in record and "progress/redone" not in record:
            return int(record["step"])
    return 0


def last_evaluated_step(path: Path, offset: int) -> int:
    """The step of the last evaluation's record after `offset`, or 0."""
    lines = (line for line in lines_from_the_end(path, offset) if b'"eval/version"' in line)
    return next((int(record["step"]) for record in json_records(lines)), 0)
