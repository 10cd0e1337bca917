"""Random runs against the real ledger file, cut off anywhere: nothing is trained twice or lost without a reason.

A crash drops everything in memory and whatever was not committed; the next process opens the file again and goes on.
The trainer is a model that outlives the orchestrator, or restarts at its last checkpoint.
"""

import asyncio
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger_audit import audit
from meshrl.core.paths import Layout
from meshrl.core.telemetry.monitor import JsonlSink
from meshrl.orchestrator.build import make_plan
from meshrl.orchestrator.config import OrchestratorConfig, TrainEnvConfig, TrainEnvsConfig
from meshrl.orchestrator.ledger.open_run import open_journal
from meshrl.orchestrator.ledger.rules import OPEN_STATES
from meshrl.orchestrator.ledger.writer import LedgerWriter
from meshrl.orchestrator.peers.connect import Mesh
from meshrl.orchestrator.work.batches import assemble
from meshrl.orchestrator.work.recipes import build_recipes, least_rollouts
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.wire.convert import batch_digest
from meshrl.wire.types import EnvironmentInfo, RolloutFailure, RunInfo, TrainerInfo
from rl_streams import rl_streams, rollout_of

GROUPS, SIZE = 2, 3


class LateWriter(LedgerWriter):
    """Commits a prefix of the changes whenever it is told to; a crash loses the rest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.changes: list = []

    def start(self) -> None:
        """Nothing to start."""

    def put(self, change) -> None:
        self.changes.append(change)

    def commit(self, count: int) -> None:
        now, self.changes = self.changes[:count], self.changes[count:]
        with closing(sqlite3.connect(self._path)) as connection, connection:
            for change in now:
                change(connection)

    def flush(self) -> Future:
        self.commit(len(self.changes))
        done: Future = Future()
        done.set_result(None)
        return done

    def close(self, deadline_s: float) -> None:
        self.commit(len(self.changes))


class World:
    """A trainer and an orchestrator, moved one event at a time."""

    def __init__(self, folder: Path, *, checkpoints: bool) -> None:
        self.config = OrchestratorConfig(
            train=TrainEnvsConfig(env=[TrainEnvConfig(id="e")]),
            batch_size=GROUPS * SIZE,
            group_size=SIZE,
            max_async_level=2,
            max_off_policy_steps=2,
            output_dir=folder,
            checkpoint_interval=1 if checkpoints else None,
            session="one",
        )
        self.checkpoints = checkpoints
        self.epoch, self.step, self.durable = 1, 0, 0
        self.queue: list[tuple[int, str, list[str]]] = []
        self.trained: dict[int, tuple[str, list[str]]] = {}  # what the weights are made of
        self.finished: set[str] = set()
        self.count = 0
        self.start()

    # --- the orchestrator ---------------------------------------------------------------------------

    def start(self) -> None:
        run = RunInfo(
            run_id="main", step=self.step, version=self.step, epoch=self.epoch, revision=0, durable_step=self.durable
        )
        trainer = TrainerInfo(
            world_size=1, dp_size=1, seq_len=2048, pad_multiple=1, objective="", model="", runs=(run,),
            max_queued_batches=2,
        )  # fmt: skip
        environment = EnvironmentInfo(name="e", taskset="e", num_tasks=5)
        mesh = Mesh(environments={"e": environment}, trainer=trainer, run=run)
        recipes = build_recipes(self.config.algos, self.config.advantage, seq_len=self.config.seq_len)
        self.writer = LateWriter(self.config.output_dir / "ledger.sqlite")
        self.journal = open_journal(
            Layout(self.config.output_dir),
            trainer,
            run,
            session=self.config.session,
            least_rollouts=least_rollouts(recipes),
            checkpoints=self.config.checkpoint_interval is not None,
            saves_last=self.config.checkpoint_at_end,
            writer=self.writer,
        )
        self.plan = make_plan(self.config, mesh, recipes)
        self.in_flight: list[tuple[GroupTicket, RolloutGroup]] = []
        start = self.journal.starting_point
        self.recorded, self.told = start.recorded, start.unlogged_from - 1
        self.uploaded = self.step
        self.batches: dict[int, tuple] = {}
        self.plan.resume_after(
            start.recorded, drawn=start.drawn, next_sequence=start.next_sequence, again=start.redispatch
        )
        for group in start.ready:
            self.drop(self.plan.readmit(group).dropped)

    def drop(self, dropped) -> None:
        for one, reason in dropped:
            self.journal.drop(one.rollout_id, reason)

    def crash(self, committed: int) -> None:
        self.writer.commit(committed)
        self.start()

    def dispatch(self) -> None:
        ticket = self.plan.dispatch(f"g{self.count}")
        if ticket is not None:
            self.count += 1
            self.journal.dispatch(ticket)
            self.in_flight.append((ticket, RolloutGroup(ticket=ticket)))

    def comes_back(self, which: int, fate: str) -> None:
        if not self.in_flight:
            return
        ticket, group = self.in_flight[which % len(self.in_flight)]
        place = len(group.rollouts) + len(group.failures)
        if fate == "fail":
            failure = RolloutFailure(
                rollout_id=f"{ticket.group_id}:{place}",
                group_id=ticket.group_id,
                reason="X",
                message="",
                retryable=True,
            )
            group.failures.append(failure)
            self.journal.record_event(ticket, failure)
        else:
            one = rollout_of(ticket, place, float(fate == "win"), self.plan.active_version)
            group.rollouts.append(one)
            self.journal.record_event(ticket, one)
            self.finished.add(one.rollout_id)
        if place + 1 == ticket.size:
            self.in_flight.remove((ticket, group))
            self.journal.close_group(group, cancelled_for="stale")
            self.drop(self.plan.finish(group).dropped)

    def take(self) -> None:
        if self.recorded - self.told >= 2:
            return
        self.drop(self.plan.drop_stale())
        if (groups := self.plan.take()) is None:
            return
        assembled = assemble(
            [group.kept for group in groups],
            run_id="main",
            step=self.recorded + 1,
            streams=rl_streams(
                [group.kept for group in groups], lambda rewards, lengths: np.asarray(rewards) - np.mean(rewards)
            ),
            environments={"e": 64},
            seq_len=64,
            dp_size=1,
        )
        asyncio.run(self.journal.batch(groups, assembled, drawn=self.plan.schedule.drawn()))
        self.recorded += 1

    def upload(self) -> None:
        self.uploaded = max(self.uploaded, self.told)
        if self.uploaded >= self.recorded:
            return
        step = self.uploaded + 1
        batch = asyncio.run(self.journal.load_batch(step))
        if step > self.step and step not in {known for known, _, _ in self.queue}:
            assert step == self.step + len(self.queue) + 1
            rollouts = sorted({one for row in batch.micro_batches for one in row.rollout_ids})
            self.queue.append((step, batch_digest(batch), rollouts))
        self.uploaded = step

    def hear(self, record: bool) -> None:
        """The loop hears that a step is done, activates it and writes its record."""
        if self.told >= min(self.step, self.recorded):
            return
        self.told += 1
        self.journal.ledger.train(self.told)
        if not record:
            return  # the record comes with the next process, if this one is cut off now
        asyncio.run(self.journal.load_step(self.told))
        self.plan.activated(self.told)
        sink = JsonlSink(self.config.output_dir / "metrics.jsonl")
        redone = {"progress/redone": 1.0} if self.journal.redone(self.told) else {}
        samples = float(self.journal.progress(self.told).samples)
        sink.write(self.told, {"time/step": 1.0, "progress/samples": samples, **redone})
        sink.close()
        self.journal.logged(self.told)
        self.journal.durable(self.durable)

    # --- the trainer --------------------------------------------------------------------------------

    def train(self) -> None:
        if self.queue:
            step, digest, rollouts = self.queue.pop(0)
            self.step = step
            known = self.trained.get(step)
            assert known is None or known[0] == digest, "a step was made again of something else"
            self.trained[step] = (digest, rollouts)

    def trainer_restarts(self) -> None:
        self.queue.clear()
        self.epoch, self.step = self.epoch + 1, self.durable
        done, self.told = self.told, min(self.told, self.step)
        self.uploaded = self.step
        self.journal.go_back(self.step, done)
        self.plan.rolled_back(self.step)

    # --- what holds ---------------------------------------------------------------------------------

    def check(self) -> None:
        counted = Counter(one for step in range(1, self.step + 1) for one in self.trained[step][1])
        assert not [one for one, times in counted.items() if times > 1]
        assert self.journal.ledger.balance().exact

    def end(self) -> None:
        """Plays the run to a quiet end and closes the books."""
        for _ in range(20):
            self.upload()
            self.train()
            self.hear(True)
        self.check()
        self.journal.end()
        self.journal.close()
        report = audit(self.config.output_dir)
        assert report.ok, report.table()
        with closing(sqlite3.connect(self.config.output_dir / "ledger.sqlite")) as connection:
            rows = connection.execute("SELECT rollout_id, state, reason, step FROM rollouts").fetchall()
            sequences = connection.execute(
                "SELECT sequence, COUNT(DISTINCT task_index) FROM groups GROUP BY sequence ORDER BY sequence"
            ).fetchall()
            came_back = connection.execute(
                "SELECT COUNT(*) FROM rollouts JOIN groups USING (group_id)"
                " WHERE state IN ('trained', 'dropped') GROUP BY sequence"
            ).fetchall()
        open_states = {state.value for state in OPEN_STATES}
        for rollout_id, state, reason, step in rows:
            assert state not in open_states
            assert (state == "trained") == (step is not None and rollout_id in self.trained.get(step, ("", []))[1])
            assert state == "trained" or reason
        trained = {rollout_id for rollout_id, state, _, _ in rows if state == "trained"}
        assert trained == {one for step in range(1, self.step + 1) for one in self.trained[step][1]}
        assert [sequence for sequence, _ in sequences] == list(range(len(sequences)))
        assert all(tasks == 1 for _, tasks in sequences)
        assert all(count <= SIZE for (count,) in came_back), "a group has more than was asked for"

    def event(self, name: str, draw: Callable[[int], int]) -> None:
        """One event; `draw(n)` chooses from 0 to n."""
        if name == "comes_back":
            self.comes_back(draw(5), ("win", "win", "lose", "fail")[draw(3)])
        elif name == "hear":
            self.hear(record=draw(5) > 0)
            if self.told > 0 and not self.journal.redone(self.told):  # done, and cut off before its record
                self.crash(draw(len(self.writer.changes)))
        elif name == "commit":
            self.writer.commit(draw(len(self.writer.changes)))
        elif name == "crash":
            self.crash(draw(len(self.writer.changes)))
        elif not self.checkpoints and name in ("checkpoint", "trainer_restarts", "both_die"):
            return
        elif name == "checkpoint":
            self.durable = self.step
            self.journal.durable(self.durable)
        elif name == "both_die":
            self.queue.clear()
            self.epoch, self.step = self.epoch + 1, self.durable
            self.crash(draw(len(self.writer.changes)))
        else:
            getattr(self, name)()
        self.check()


WORK = ["dispatch"] * 4 + ["comes_back"] * 12 + ["take"] * 4 + ["upload"] * 3 + ["train"] * 3 + ["hear"] * 4
FAULTS = ["crash", "crash", "commit", "checkpoint", "trainer_restarts", "both_die"]


@settings(max_examples=15, deadline=None)
@given(
    checkpoints=st.booleans(),
    events=st.lists(st.sampled_from(WORK + FAULTS), min_size=20, max_size=150),
    data=st.data(),
)
def test_a_run_cut_off_anywhere_counts_every_rollout_once(
    checkpoints: bool, events: list[str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), checkpoints=checkpoints)
        for name in events:
            world.event(name, lambda most: data.draw(st.integers(0, most)))
        world.end()


@pytest.mark.parametrize("seed", range(8))
def test_long_runs_with_rare_faults_count_every_rollout_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    world = World(tmp_path, checkpoints=seed % 4 > 0)
    events = WORK * 3 + FAULTS[: 1 + seed % len(FAULTS)] + ["checkpoint"]
    for _ in range(300):
        world.event(chance.choice(events), lambda most: chance.randint(0, most))
    world.end()
    assert world.step > 0
