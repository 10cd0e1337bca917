"""Opens the books of a run: finds out whether the last run of the folder goes on, and settles what it left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from loguru import logger

from meshrl.core.paths import Layout
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.groups import Group
from meshrl.orchestrator.journal import Journal, Opening, read_state
from meshrl.orchestrator.ledger import Ledger
from meshrl.orchestrator.ledger_rows import Past, RunRow
from meshrl.orchestrator.ledger_store import LedgerStore
from meshrl.orchestrator.ledger_writer import Writer
from meshrl.orchestrator.recovery import Settlement, goes_on, restore, rows_fit, settle
from meshrl.orchestrator.startup import Mesh


def open_journal(config: OrchestratorConfig, mesh: Mesh, writer: Writer | None = None) -> Journal:
    """Opens the ledger of `output_dir` for this trainer. Blocks. Raises sqlite3.Error when it cannot be used."""
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
        opening = _go_on(config, mesh, ledger, store, store.resume(row, trainer_step=run.step))
    else:
        store.begin(this)
        progress, drawn = read_state(layout, run.step)
        opening = Opening(
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
        opening,
        layout=layout,
        durable=run.durable_step,
        checkpoints=config.checkpoint_interval is not None,
    )


def _go_on(config: OrchestratorConfig, mesh: Mesh, ledger: Ledger, store: LedgerStore, past: Past) -> Opening:
    layout, step = Layout(config.output_dir), mesh.run.step
    logged = max(logged_steps(layout.metrics_jsonl, past.run.metrics_offset), default=0)
    settlement = settle(
        past,
        trainer_step=step,
        logged_step=logged,
        fits=lambda record: rows_fit(record, dp_size=mesh.trainer.dp_size, seq_len=mesh.trainer.seq_len),
        environments={env.resolved_name for env in config.train.env},
    )
    restore(ledger, past, settlement)
    ready = _ready_groups(store, past, settlement)
    carried = {group_id: tuple(store.rollouts(rollouts).values()) for group_id, rollouts in settlement.carried}
    renewed = {ticket.group_id for ticket in settlement.redispatch}
    for group_id in settlement.interrupted:
        if group_id in past.groups and group_id not in renewed:
            store.over(past.groups[group_id].group)
    logger.warning(
        f"going on with run {past.run.run_id!r} from {layout.ledger}: the trainer is at step {step};"
        f" {len(settlement.again)} batches are submitted again, {len(ready)} groups wait for a step,"
        f" {len(settlement.redispatch)} are completed"
    )
    record = past.steps.get(step)
    return Opening(
        recorded=max(settlement.again, default=step),
        logged=logged,
        unlogged_from=min(settlement.unlogged, default=step + 1),
        progress=record.progress if record is not None else read_state(layout, step)[0],
        records={known: one for known, one in past.steps.items() if known in past.kept or known == step},
        ready=ready,
        redispatch=settlement.redispatch,
        carried=carried,
        drawn=past.drawn,
        next_sequence=past.next_sequence,
    )


def _ready_groups(store: LedgerStore, past: Past, settlement: Settlement) -> tuple[Group, ...]:
    """The groups that are left, with their rollouts."""
    payloads = store.rollouts(one for _, rollouts in settlement.ready for one in rollouts)
    groups = []
    for group_id, rollout_ids in settlement.ready:
        group = past.groups[group_id].group
        group.rollouts = [payloads[one] for one in rollout_ids]
        groups.append(group)
    return tuple(groups)


def end_whole(path: Path) -> int:
    """Cuts off a last line that a killed process left half written; returns the size of the file then."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        data = file.read()
        size = data.rfind(b"\n") + 1
        if size < len(data):
            file.truncate(size)
    return size


def logged_steps(path: Path, offset: int) -> list[int]:
    """The steps whose records follow `offset`, in order of writing; evaluations have records of their own."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        records = [json.loads(line) for line in file.read().splitlines()]
    return [int(record["step"]) for record in records if "time/step" in record]
