"""What the commands read from a run's folder, whole or half written."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import socket
import time
from pathlib import Path

import pytest

from meshrl.cli.run_folder import RunFolder
from meshrl.orchestrator.ledger.rows import RunRow
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.wire.program_state import ProgramState


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "configs").mkdir()
    return RunFolder(tmp_path)


def configure(folder: RunFolder, program: str, text: str) -> None:
    (folder.path / "configs" / f"{program}.toml").write_text(text)


def test_the_orchestrator_says_where_services_are(folder: RunFolder) -> None:
    configure(folder, "orchestrator", '[services]\nrollout = ["a:1", "b:2"]\ntrainer = "c:3"\n')
    assert folder.addresses("rollout") == ("a:1", "b:2")
    assert folder.addresses("trainer") == ("c:3",)


def test_a_service_without_an_orchestrator_says_where_it_is_itself(folder: RunFolder) -> None:
    configure(folder, "weights", '[server]\nhost = "0.0.0.0"\nport = 50053\n')
    assert folder.addresses("weights") == ("127.0.0.1:50053",)
    configure(folder, "rollout", '[server]\nhost = "::1"\nport = 50051\n')
    assert folder.addresses("rollout") == ("[::1]:50051",)
    assert folder.addresses("trainer") == ()
    (folder.path / "configs/trainer.toml").write_bytes(b"\xff")  # damaged
    assert folder.addresses("trainer") == ()


@pytest.mark.parametrize(
    ("serves", "called"),
    [("0.0.0.0:50053", "127.0.0.1:50053"), ("[::]:50053", "[::1]:50053"), ("10.0.0.4:50053", "10.0.0.4:50053")],
)
def test_a_service_that_was_started_by_hand_is_found_by_its_state(folder: RunFolder, serves: str, called: str) -> None:
    (folder.path / "state").mkdir()
    state = ProgramState(
        program="weights", host=socket.gethostname(), pid=1, at_s=time.time(), stuck_s=0.0, serves=(serves,)
    )
    (folder.path / "state/weights.json").write_text(state.to_json())
    assert folder.addresses("weights") == (called,)
    elsewhere = dataclasses.replace(state, host="another machine")
    (folder.path / "state/weights.json").write_text(elsewhere.to_json())
    assert folder.addresses("weights") == ()


def test_a_folder_without_a_run_has_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "none")
    assert folder.addresses("rollout") == ()
    assert folder.last_step() is None
    assert folder.metrics_age_s(0.0) is None
    assert folder.ledger() is None
    assert folder.logs() == {}
    assert list(folder.spans()) == []
    assert not folder.is_held()


def test_the_last_step_is_the_last_whole_one(folder: RunFolder) -> None:
    lines = [
        json.dumps({"step": 7, "time/step": 1.5}),
        json.dumps({"step": 8, "time/step": 2.5}),
        json.dumps({"step": 8, "eval/task/avg@1": 0.5}),
        '{"step": 9, "time/st',
    ]
    (folder.path / "metrics.jsonl").write_text("\n".join(lines))
    assert folder.last_step() == {"step": 8, "time/step": 2.5}


def test_records_of_an_earlier_run_in_the_folder_are_not_the_runs_own(folder: RunFolder) -> None:
    metrics = folder.path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "time/step": 60.0, "reward/all/mean": 0.1}) + "\n")
    store = LedgerStore(folder.path / "ledger.sqlite")
    store.open()
    offset = metrics.stat().st_size
    store.begin(RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=offset))
    store.close()
    assert (folder.last_step(), folder.outcome(), folder.history().names) == (None, None, [])
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 1, "time/step": 2.0}) + "\n")
    assert folder.last_step() == {"step": 1, "time/step": 2.0}
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome.seconds == 2.0


def test_a_lock_tells_a_run_that_lives_from_one_that_has_ended(folder: RunFolder) -> None:
    with (folder.path / "rl.lock").open("w") as lock:
        assert not folder.is_held()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.is_held()
    assert not folder.is_held()


def test_logs_are_named_by_their_place(folder: RunFolder) -> None:
    for name in ("trainer", "envs/train/words/env_server"):
        path = folder.path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(folder.logs()) == ["envs/train/words/env_server", "trainer"]
    assert folder.attempts() == []


def test_logs_are_those_of_the_newest_start_unless_another_is_named(folder: RunFolder) -> None:
    for attempt in (9, 10):
        path = folder.path / "logs" / f"attempt_{attempt}" / "trainer.log"
        path.parent.mkdir(parents=True)
        path.touch()
    (folder.path / "logs" / "latest").symlink_to("attempt_10")
    (folder.path / "logs" / "trainer.log").symlink_to("latest/trainer.log")
    assert folder.attempts() == [9, 10]
    assert folder.logs() == {"trainer": folder.path / "logs" / "attempt_10" / "trainer.log"}
    assert folder.logs(9) == {"trainer": folder.path / "logs" / "attempt_9" / "trainer.log"}


def test_spans_of_a_file_that_has_gone_before_it_is_read_are_left_out(folder: RunFolder) -> None:
    (folder.path / "traces").mkdir()
    (folder.path / "traces" / "rollout.1.jsonl.zst").symlink_to("nowhere")  # listed, and not there when it is opened
    span = {"name": "rl.step", "traceId": "0a", "spanId": "01", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    (folder.path / "traces" / "trainer.jsonl").write_text(f"{line}\n")
    assert [(found.program, found.name, found.process) for found in folder.spans()] == [("trainer", "rl.step", 0)]
