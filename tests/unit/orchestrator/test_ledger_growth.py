"""A ledger of many steps: what a step costs and what its payloads take on disk stays the same."""

import sqlite3
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from meshrl.orchestrator.ledger.rows import RunRow
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.ledger.writer import LedgerWriter

RUN = RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0)


class CountingWriter(LedgerWriter):
    """Commits each change at once, and counts the instructions that SQLite's virtual machine took for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.instructions = 0

    def start(self) -> None:
        self.connection = sqlite3.connect(self._path)
        self.connection.set_progress_handler(self._count, 1)

    def _count(self) -> int:
        self.instructions += 1
        return 0

    def put(self, change) -> None:
        with self.connection:
            change(self.connection)

    def flush(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self, deadline_s: float) -> None:
        self.connection.close()


def train(store: LedgerStore, ledger: Ledger, group, rollouts, step: int) -> None:
    """One group through a step, without the batch itself."""
    ledger.dispatch(group.ticket)
    for rollout in rollouts:
        store.keep(rollout)
        ledger.finish(group.ticket, rollout.rollout_id, rollout.oldest_version)
    ledger.close_group(group.ticket.group_id)
    ledger.batch([rollout.rollout_id for rollout in rollouts], step)
    ledger.train(step)


def test_forgetting_a_step_costs_the_same_after_many_steps(make_group, make_rollout, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = CountingWriter(path)
    store = LedgerStore(path, writer)
    store.open()
    store.begin(RUN)
    ledger = Ledger(store.record)
    costs = []
    for step in range(1, 41):
        train(store, ledger, make_group(f"g{step}", size=2), [make_rollout(f"{step}a"), make_rollout(f"{step}b")], step)
        before = writer.instructions
        store.forget(step)
        costs.append(writer.instructions - before)
        ledger.make_final(step)
    left = writer.connection.execute("SELECT COUNT(*) FROM payloads").fetchone()[0]
    store.close()
    assert left == 0
    assert max(costs[10:]) <= 1.2 * max(costs[:10])


def test_the_file_reuses_the_room_of_payloads_that_went(make_group, make_rollout, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = LedgerStore(path)
    store.open()
    store.begin(RUN)
    ledger = Ledger(store.record)
    payload_bytes, sizes = 0, []
    for step in range(1, 61):
        rollout = make_rollout(f"{step}a", sampled=20_000)
        payload_bytes += rollout.samples[0].token_ids.nbytes
        train(store, ledger, make_group(f"g{step}", size=1), [rollout], step)
        store.forget(step)
        store.flush().result(60.0)
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    store.close()
    assert sizes[-1] - sizes[30] < 300_000  # rows that stay, and no more than a checkpoint of the log
    assert payload_bytes > 4_000_000
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] == 60
