"""Who waits for whom is followed from program to program, and ends at whoever can be expected nothing of."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.wire.program_state import ProgramState, WaitState, from_json, read_states, run_line, waiting_chain

NOW_S = time.time()


def program(name: str, *waits: WaitState, serves: tuple[str, ...] = ()) -> ProgramState:
    host, pid = socket.gethostname(), os.getpid()
    return ProgramState(program=name, host=host, pid=pid, at_s=NOW_S, serves=serves, waits=waits)


def wait(name: str, what: str, seconds: float, *on: str, overdue: bool = False) -> WaitState:
    return WaitState(name=name, what=what, seconds=seconds, on=on, overdue=overdue)


STATES = {
    state.program: state
    for state in (
        program("trainer", wait("batch", "batch 18", 130.0, "orchestrator")),
        program("orchestrator", wait("groups", "5 groups of 'hangs'", 125.0, "10.0.0.1:5", "10.0.0.2:5")),
        program("rollout", wait("hangs", "5 rollouts of 'hangs'", 120.0, "rollout_worker_2"), serves=("0.0.0.0:5",)),
        program("rollout_worker_2"),
        program("inference", serves=("127.0.0.1:8000",)),
    )
}


def test_the_chain_leads_from_the_trainer_to_the_worker() -> None:
    assert waiting_chain(STATES, "trainer", NOW_S) == (
        "trainer waits for batch 18, 130 s: orchestrator waits for 5 groups of 'hangs', 125 s: rollout waits for"
        " 5 rollouts of 'hangs', 120 s"
    )
    assert run_line(STATES, NOW_S) == waiting_chain(STATES, "trainer", NOW_S)


def test_the_chain_ends_at_a_program_whose_loop_is_stuck_and_names_it() -> None:
    stuck = {**STATES, "rollout_worker_2": replace(STATES["rollout_worker_2"], stuck_s=20.0)}
    line = run_line(stuck, NOW_S)
    assert line.endswith("120 s: rollout_worker_2 answers nobody: its event loop is stuck for 20 s")


def test_an_engine_is_found_by_its_url_and_a_silent_program_beside_the_chain_is_named_after_it() -> None:
    calls = wait("model call", "16 rollouts in a model call", 40.0, "http://127.0.0.1:8000")
    states = {
        "rollout": program("rollout", calls),
        "inference": replace(STATES["inference"], at_s=NOW_S - 41.0),
        "orchestrator": program("orchestrator", wait("groups", "groups", 39.0, "rollout")),
        "weights": replace(program("weights"), pid=2**22 + 1),
    }
    assert run_line(states, NOW_S) == (
        "orchestrator waits for groups, 39 s: rollout waits for 16 rollouts in a model call, 40 s: inference says"
        f" nothing for 41 s (process {os.getpid()} on {socket.gethostname()});"
        f" weights is gone: process {2**22 + 1} ended 0 s ago without saying so"
    )


def test_programs_that_wait_for_each_other_do_not_turn_the_chain_into_a_circle() -> None:
    states = {
        "trainer": program("trainer", wait("batch", "batch 2", 3.0, "orchestrator")),
        "orchestrator": program("orchestrator", wait("groups", "version 1", 3.0, "trainer", "weights")),
    }
    assert run_line(states, NOW_S) == "trainer waits for batch 2, 3 s: orchestrator waits for version 1, 3 s"


def test_an_overdue_wait_comes_before_a_longer_one_that_is_usual() -> None:
    state = program("trainer", wait("step", "step 3", 90.0), wait("batch", "batch 4", 40.0, overdue=True))
    longest = state.longest()
    assert longest is not None
    assert longest.what == "batch 4"


def test_states_are_read_as_they_were_written_and_others_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    for name, state in STATES.items():
        (tmp_path / "state" / f"{name}.json").write_text(state.to_json())
    (tmp_path / "state" / "half.json").write_text('{"program": "x"')
    (tmp_path / "state" / "other.json").write_text('{"program": "x"}')
    assert read_states(tmp_path) == STATES
    with pytest.raises(ValueError, match="not the state of a program"):
        from_json('{"program": "x"}')
