"""Opens the books of a run: finds out whether the last run of the folder goes on, and settles what it left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from loguru import logger

from meshrl.core.paths import Layout
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.ledger.journal import Journal, StartingPoint, read_state, state_path
from meshrl.orchestrator.ledger.resume import ResumePlan, goes_on, plan_resume, restore, rows_fit
from meshrl.orchestrator.ledger.rows import Past, RunRow
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.ledger.writer import Writer
from meshrl.orchestrator.peers.connect import Mesh
from meshrl.orchestrator.work.tally import RunTotals
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import RunError
from meshrl.wire.types import Rollout

_BLOCK_BYTES = 2**16


def open_journal(config: OrchestratorConfig, mesh: Mesh, writer: Writer | None = None) -> Journal:
    """Opens the ledger of `output_dir` for this trainer. Blocks. Raises RunError when it cannot be used."""
    layout, run = Layout(config.output_dir), mesh.run
    size = end_whole(layout.metrics_jsonl)
    store = LedgerStore(layout.ledger, writer)
    ledger = Ledger(store.record)
    last = store.open()
    this = RunRow(
        run=0 if last is None else last.run,
        run_id=run.run_id,
        session=config.session,
        epoch=run.epoch,
        first_step=run.step + 1,
        metrics_offset=size,
    )
    if last is not None and goes_on(
        last, run_id=run.run_id, session=config.session, epoch=run.epoch, trainer_step=run.step
    ):
        first_step = min(last.first_step, this.first_step)
        row = replace(this, first_step=first_step, metrics_offset=last.metrics_offset)
        start = _go_on(config, mesh, ledger, store, store.resume(row, trainer_step=run.step))
    else:
        store.begin(this)
        progress, drawn = read_state(layout, run.step)
        start = StartingPoint(
            recorded=run.step,
            logged=run.step,
            unlogged_from=run.step + 1,
            progress=progress,
            records={},
            drawn=drawn,
            next_sequence=sum(drawn.values()),
        )
    return Journal(
        ledger,
        store,
        start,
        layout=layout,
        durable=run.durable_step,
        checkpoints=config.checkpoint_interval is not None,
    )


def _go_on(config: OrchestratorConfig, mesh: Mesh, ledger: Ledger, store: LedgerStore, past: Past) -> StartingPoint:
    layout, step = Layout(config.output_dir), mesh.run.step
    logged = last_logged_step(layout.metrics_jsonl, past.run.metrics_offset)
    decide = partial(
        plan_resume,
        trainer_step=step,
        logged_step=logged,
        fits=lambda record: rows_fit(record, dp_size=mesh.trainer.dp_size, seq_len=mesh.trainer.seq_len),
        environments={env.resolved_name for env in config.train.env},
    )
    past, plan, rollouts = _sound(store, past, decide)
    progress = _progress(layout, past, step)
    restore(ledger, past, plan)
    ready = tuple(_with_rollouts(past, *members, rollouts) for members in plan.ready)
    carried = {group_id: tuple(rollouts[one] for one in members) for group_id, members in plan.carried}
    renewed = {ticket.group_id for ticket in plan.redispatch}
    for group_id in plan.interrupted:
        if group_id in past.groups and group_id not in renewed:
            store.over(past.groups[group_id].group)
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
        progress=progress,
        records={known: one for known, one in past.steps.items() if known in past.kept or known == step},
        ready=ready,
        redispatch=plan.redispatch,
        carried=carried,
        drawn=past.drawn,
        next_sequence=past.next_sequence,
    )


def _sound(
    store: LedgerStore, past: Past, decide: Callable[[Past], ResumePlan]
) -> tuple[Past, ResumePlan, dict[str, Rollout]]:
    """Decides, reads what that needs, and decides again without what is damaged.

    Returns what is left, the decision, and the rollouts of groups that wait for a step or are completed.
    """
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


def _progress(layout: Layout, past: Past, step: int) -> RunTotals:
    """Totals up to the trainer's step. Raises RunError when what had them is damaged."""
    if step in past.steps:
        return past.steps[step].progress
    if step in past.damaged_steps and not state_path(layout, step).exists():
        raise RunError(
            f"the record of step {step} in {layout.ledger} is damaged, and nothing else has the run's totals; resume"
            " another step with --ckpt.resume-step, or move the ledger away and start again: totals count from 0 then"
        )
    return read_state(layout, step)[0]


def _with_rollouts(past: Past, group_id: str, members: Sequence[str], rollouts: Mapping[str, Rollout]) -> RolloutGroup:
    """A group that is left, with its rollouts."""
    group = past.groups[group_id].group
    group.rollouts = [rollouts[one] for one in members]
    return group


def end_whole(path: Path) -> int:
    """Cuts off a last line that a killed process left half written; returns the size of the file then."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        for start, block in _blocks_from_the_end(file, 0):
            if (end := block.rfind(b"\n")) >= 0:
                whole = start + end + 1
                break
        else:
            whole = 0
        if whole < size:
            file.truncate(whole)
    return whole


def last_logged_step(path: Path, offset: int) -> int:
    """The last step with a record after `offset`, 0 without one; evaluations have records of their own.

    Read from the end: records of steps that were done again follow those of later steps, and say so.
    """
    if not path.exists():
        return 0
    rest = b""
    with path.open("rb") as file:
        for start, block in _blocks_from_the_end(file, offset):
            lines = (block + rest).split(b"\n")
            rest = b"" if start == offset else lines.pop(0)  # its beginning is in the block before
            for line in reversed(lines):
                try:
                    record = json.loads(line) if line else {}
                except ValueError:  # damaged: the audit names it, and the line before it tells as much
                    continue
                if "time/step" in record and "progress/redone" not in record:
                    return int(record["step"])
    return 0


def _blocks_from_the_end(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The bytes after `offset` in blocks, the last one first, with the place where each begins."""
    end = file.seek(0, os.SEEK_END)
    while end > offset:
        start = max(offset, end - _BLOCK_BYTES)
        file.seek(start)
        yield start, file.read(end - start)
        end = start
