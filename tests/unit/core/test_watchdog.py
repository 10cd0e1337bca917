"""A program's waits are learnt and said by name, and its event loop is watched from beside it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.core.program import run
from meshrl.core.telemetry import watchdog
from meshrl.core.telemetry.waits import CountedWait, Waits
from meshrl.core.telemetry.watchdog import ProgramWatch
from meshrl.wire.program_state import ProgramState, WaitState, read_states, troubles_for

DEADLINE_S = 60.0


class Seconds:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_wait_is_overdue_after_three_times_the_median_of_its_kind() -> None:
    now = Seconds()
    waits = Waits(now)
    for length_s in (20.0, 4.0, 8.0):
        with waits.waiting("batch", "an earlier batch"):
            now.now_s += length_s
    with waits.waiting("batch", "batch 4", ("orchestrator",)), waits.waiting("publication", lambda: "version 3"):
        now.now_s += 23.9
        batch, publication = sorted(waits.look(0.0), key=lambda wait: wait.name)
        assert (batch.what, batch.on, batch.usual_s, batch.overdue) == ("batch 4", ("orchestrator",), 8.0, False)
        assert (publication.what, publication.usual_s, publication.overdue) == ("version 3", None, True)
        now.now_s += 0.1
        assert [wait.overdue for wait in waits.look(0.0)] == [True, True]
    assert waits.look(0.0) == ()


def test_waits_shorter_than_ten_seconds_are_never_overdue() -> None:
    now = Seconds()
    waits = Waits(now)
    with waits.waiting("batch", "batch 1"):
        now.now_s += 0.1
    with waits.waiting("batch", "batch 2"):
        now.now_s += 9.9
        assert [wait.overdue for wait in waits.look(0.0)] == [False]


def test_many_waits_of_a_kind_are_one_line_and_those_that_end_are_its_median() -> None:
    waits = Waits(Seconds())
    playing = [
        CountedWait(index, "hangs scoring_s", ("rollout_worker_2",), 100.0 - index, f"rollouts of 'hangs' ({index})")
        for index in range(3)
    ]
    waits.count(lambda: playing)
    (found,) = waits.look(101.0)
    assert (found.what, found.on, found.seconds) == ("3 rollouts of 'hangs' (2)", ("rollout_worker_2",), 3.0)
    del playing[1:]
    (found,) = waits.look(140.0)
    assert (found.what, found.seconds, found.usual_s, found.overdue) == ("1 rollouts of 'hangs' (0)", 40.0, 2.5, True)
    assert found.reported


def test_an_overdue_wait_is_said_with_whom_it_is_on_and_a_blocked_loop_too(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(watchdog, "WRITE_EVERY_S", 0.04)
    monkeypatch.setattr(watchdog, "LATE_S", 0.3)
    waits, stuck_s = Waits(least_s=0.05), []

    async def until(what) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not what():  # noqa: ASYNC110  # a thread writes what is waited for
                await asyncio.sleep(0.01)

    async def main(stop: asyncio.Event) -> int:
        watch = ProgramWatch("trainer", waits, tmp_path)
        watch.start()
        try:
            with waits.waiting("batch", "batch 18", ("orchestrator",)):
                await until(lambda: sum("batch 18" in line for line in said) >= 2)
            await until(lambda: "trainer" in read_states(tmp_path) and not read_states(tmp_path)["trainer"].waits)
            end = time.monotonic() + DEADLINE_S
            while not stuck_s and time.monotonic() < end:  # the loop is blocked, the watch is not
                time.sleep(0.05)  # noqa: ASYNC251
                stuck_s.extend(state.stuck_s for state in read_states(tmp_path).values() if state.stuck_s > 0.3)
            await until(lambda: any("the event loop of trainer answered" in line for line in said))
        finally:
            watch.stop()
        return 0

    assert run(main) == 0
    line = next(line for line in said if "batch 18" in line)
    assert re.match(r"waiting for \d+ s: batch 18, ", line)  # of a second or two on a busy machine
    assert stuck_s
    assert read_states(tmp_path) == {}, "a program that ends well leaves nothing"


def saying(program: str, **more) -> ProgramState:
    return ProgramState(program=program, host="another machine", pid=1, at_s=100.0, **more)


def test_a_program_says_of_those_it_waits_for_that_they_are_in_trouble_and_the_orchestrator_of_all() -> None:
    engine = saying("inference", serves=("127.0.0.1:8000",), stuck_s=7.0)
    others = {"inference": engine, "weights": saying("weights", stuck_s=30.0), "trainer": saying("trainer")}
    wait = WaitState(name="turn", what="a model call", seconds=1.0, on=("http://127.0.0.1:8000",))
    stuck = "answers nobody: its event loop is stuck for 7 s"
    assert troubles_for(saying("rollout", waits=(wait,)), others, every=False) == {"inference": stuck}
    assert troubles_for(saying("rollout"), others, every=False) == {}
    assert troubles_for(saying("orchestrator"), others, every=True).keys() == {"inference", "weights"}
    assert troubles_for(engine, others, every=True).keys() == {"weights"}, "of itself it cannot say that"


async def test_trouble_is_said_once_and_so_is_its_end_but_not_that_of_a_run_before(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(watchdog, "WRITE_EVERY_S", 0.02)
    waits = Waits()
    watch = ProgramWatch("orchestrator", waits, tmp_path)
    (tmp_path / "state").mkdir()

    def write(program: str, **more) -> None:
        state = replace(saying(program), **{"at_s": time.time() + 60.0, **more})
        part = tmp_path / "state" / f"{program}.part"
        part.write_text(state.to_json())
        part.replace(tmp_path / "state" / f"{program}.json")

    async def until(words: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(words in line for line in said):  # noqa: ASYNC110  # a thread says it
                await asyncio.sleep(0.01)

    write("trainer", at_s=time.time() - 60.0)
    write("weights", stuck_s=9.0, loop_lag_s=9.0)
    watch.start()
    try:
        await until("weights answers nobody: its event loop is stuck for 9 s")
        assert waits.lags_s.keys() - {"orchestrator"} == {"weights"}
        assert waits.lags_s["weights"] == 9.0
        write("weights")
        await until("weights works again")
    finally:
        watch.stop()
    assert sum("weights answers nobody" in line for line in said) == 1
    assert not any(line.startswith("trainer") for line in said)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from meshrl.core.program import run
from meshrl.core.telemetry import watchdog
from meshrl.core.telemetry.waits import Waits

async def main(stop):
    waits = Waits()
    waits.serves = ("127.0.0.1:8000",)
    watchdog.ProgramWatch("inference", waits, Path(sys.argv[1])).start()
    await stop.wait()
    return 0

run(main)
"""


def test_a_program_that_is_stopped_or_killed_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    try:
        end = time.monotonic() + DEADLINE_S
        while not (states := read_states(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert states["inference"].trouble(time.time()) == ""
        assert "says nothing for" in states["inference"].trouble(time.time() + 100.0)
        os.kill(process.pid, signal.SIGSTOP)
        while not (trouble := read_states(tmp_path)["inference"].trouble(time.time())):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert trouble == f"is stopped: process {process.pid} got SIGSTOP, and kill -CONT {process.pid} lets it go on"
        process.kill()
        process.wait(DEADLINE_S)
        trouble = read_states(tmp_path)["inference"].trouble(time.time())
        assert trouble.startswith(f"is gone: process {process.pid} ended")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
