"""What the ledger costs a run: rollouts and batches go through its file as the loop sends them, at full speed.

Usage: bench_ledger.py [--tokens N ...] [--steps N] [--folder FOLDER]
Prints a row for each length of rollout: rollouts/s until all is on disk, bytes written, the time that one rollout takes
on the orchestrator's event loop, and how long a step waits for the disk before its batch is submitted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.journal import Journal, StartingPoint
from meshrl.orchestrator.ledger.rows import RunRow
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.work.batches import AssembledBatch, assemble
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.wire.types import Rollout, Sample, VersionSpan
from rl_streams import rl_streams

GROUPS, SIZE, PROMPT = 16, 8, 64
KEPT_STEPS = 4  # batches and payloads that wait for a checkpoint


def make_rollout(name: str, group_id: str, tokens: int) -> Rollout:
    sample = Sample(
        token_ids=np.zeros(tokens, dtype=np.int32),
        loss_mask=np.arange(tokens) >= PROMPT,
        logprobs=np.zeros(tokens, dtype=np.float32),
        version_spans=(VersionSpan(start=PROMPT, end=tokens, version=0),),
    )
    reward = float(name[-1] in "02468")
    return Rollout(rollout_id=name, group_id=group_id, task_key="t", environment="e", samples=(sample,), reward=reward)


def make_groups(step: int, tokens: int) -> list[RolloutGroup]:
    groups = []
    for place in range(GROUPS):
        ticket = GroupTicket(
            group_id=f"{step}-{place}", task=TaskRef(environment="e", index=place), size=SIZE, for_step=step,
            min_version=0, active_version=0, seed=0, sequence=step * GROUPS + place,
        )  # fmt: skip
        rollouts = [make_rollout(f"{step}-{place}-{number}", ticket.group_id, tokens) for number in range(SIZE)]
        groups.append(RolloutGroup(ticket=ticket, rollouts=rollouts))
    return groups


def make_batch(groups: list[RolloutGroup], step: int, tokens: int) -> AssembledBatch:
    return assemble(
        [group.rollouts for group in groups],
        run_id="main",
        step=step,
        dp_size=1,
        environments={"e": max(tokens, 4096)},
        streams=rl_streams([group.rollouts for group in groups], lambda rewards, lengths: np.asarray(rewards) - 0.5),
        seq_len=max(tokens, 4096),
    )


def dispatch_and_finish(journal: Journal, groups: list[RolloutGroup]) -> None:
    for group in groups:
        journal.dispatch(group.ticket)
        for rollout in group.rollouts:
            journal.record_event(group.ticket, rollout)
        journal.close_group(group, cancelled_for="stale")


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("ledger*")) / 1e6


async def measure(folder: Path, *, tokens: int, steps: int) -> str:
    layout = Layout(folder)
    store = LedgerStore(layout.ledger)
    store.open()
    store.begin(RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0))
    start = StartingPoint(recorded=0, logged=0, unlogged_from=1, records={}, drawn={})
    journal = Journal(Ledger(store.record), store, start, layout=layout, durable=0, checkpoints=True)
    on_loop_s, waits_s, made_s = 0.0, [], 0.0
    began_s = time.perf_counter()
    for step in range(1, steps + 1):
        start_s = time.perf_counter()
        groups = make_groups(step, tokens)
        assembled = make_batch(groups, step, tokens)
        made_s += time.perf_counter() - start_s
        start_s = time.perf_counter()
        dispatch_and_finish(journal, groups)
        on_loop_s += time.perf_counter() - start_s
        for group in groups:
            group.kept = tuple(group.rollouts)
        start_s = time.perf_counter()
        await journal.batch(groups, assembled, drawn={})
        waits_s.append(time.perf_counter() - start_s)
        journal.ledger.train(step)
        journal.logged(step)
        journal.durable(step - KEPT_STEPS)
    await asyncio.to_thread(journal.close)
    seconds = time.perf_counter() - began_s - made_s
    rollouts = steps * GROUPS * SIZE
    return (
        f"{tokens:>10,}  {rollouts / seconds:>10,.0f}  {on_loop_s / rollouts * 1e6:>15.0f}"
        f"  {np.median(waits_s) * 1e3:>15.1f}  {size_mb(folder):>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the ledger costs.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 16384])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="measure the disk that holds this folder")
    read = parser.parse_args()
    print(f"steps of {GROUPS * SIZE} rollouts; payloads and batches of {KEPT_STEPS} steps are kept")
    print(f"{'tokens':>10}  {'rollouts/s':>10}  {'us on the loop':>15}  {'ms of a step':>15}  {'file MB':>9}")
    for tokens in read.tokens:
        with tempfile.TemporaryDirectory(dir=read.folder) as folder:
            print(asyncio.run(measure(Path(folder), tokens=tokens, steps=read.steps)), flush=True)


if __name__ == "__main__":
    main()
