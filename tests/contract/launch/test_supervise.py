"""Nothing survives the end of a run, however it ends; real processes, each a few lines of Python."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from loguru import logger

from meshrl.launch import supervise as supervise_module
from meshrl.launch.supervise import Grace, Program, Supervisor
from polling import until

PYTHON = [sys.executable, "-I", "-S", "-c"]
# Writes its pid first, so that a test knows when it is up.
UP = "import os, signal, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
SLEEP = "time.sleep(600)\n"
DRAINS = "signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))\n"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
CHILD = "import subprocess; subprocess.Popen([sys.executable, '-I', '-S', '-c', {code!r}, sys.argv[1] + '.child'])\n"
DEADLINE_S = 60.0


def wait_for(log: Path) -> str:
    """Code that waits until another program has written a line."""
    return f"while not (os.path.exists({str(log)!r}) and os.path.getsize({str(log)!r})): time.sleep(0.01)\n"


class Programs:
    """Programs of one test, and what became of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listed: list[Program] = []

    def add(self, name: str, code: str, *, leader: bool = False, restarts: int = 0, end_stage: int = 1) -> None:
        self.listed.append(
            Program(
                name=name,
                command=[*PYTHON, UP + code, str(self.folder / name)],
                log=self.folder / f"{name}.log",
                leader=leader,
                restarts=restarts,
                end_stage=end_stage,
            )
        )

    def pid(self, name: str) -> int | None:
        path = self.folder / name
        text = path.read_text() if path.exists() else ""  # empty for a moment, as one starts
        return int(text) if text else None

    def kill(self, name: str) -> int:
        """Kills one that runs, which has written its pid; returns that."""
        pid = int((self.folder / name).read_text())
        os.kill(pid, signal.SIGKILL)
        return pid

    async def up(self, *names: str) -> None:
        """Waits until the programs run."""
        await until(lambda: all(self.pid(name) for name in names))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def alive(self) -> list[str]:
        """Names of the programs, and their children, that still run."""
        names = [path.name for path in self.folder.iterdir() if path.suffix != ".log"]
        return sorted(name for name in names if runs(self.pid(name)))


def runs(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(programs: Programs) -> bool:
    """True once nothing runs any more; waits for up to the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while programs.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    return programs.alive() == []


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


@pytest.fixture
def messages() -> list[str]:
    """What is logged during the test."""
    logger.remove()
    lines: list[str] = []
    logger.add(lambda message: lines.append(str(message)), format="{level} {message}")
    return lines


async def supervise(
    programs: Programs, stop: asyncio.Event | None = None, show: Callable[[str], object] = str, **grace: float
) -> int:
    supervisor = Supervisor(programs.listed, grace=Grace(**{"shutdown_s": 30.0, "failure_s": 1.0, **grace}), show=show)
    async with asyncio.timeout(DEADLINE_S):
        return await supervisor.run(stop or asyncio.Event())


async def test_run_is_over_when_the_leader_is_done(programs: Programs, messages: list[str]) -> None:
    programs.add("server", DRAINS + "print('ready', flush=True)\n" + SLEEP)
    programs.add("leader", wait_for(programs.folder / "server.log"), leader=True)
    assert await supervise(programs) == 0
    assert programs.alive() == []
    assert "INFO leader is done; ending the other programs\n" in messages


async def test_the_run_is_over_when_every_leader_has_ended_and_one_that_fails_leaves_the_others_alone(
    programs: Programs, messages: list[str]
) -> None:
    programs.add("server", DRAINS + "print('ready', flush=True)\n" + SLEEP)
    programs.add("failing", wait_for(programs.folder / "server.log") + "print('broken'); sys.exit(3)", leader=True)
    programs.add("second", wait_for(programs.folder / "failing.log") + "print('two')", leader=True)
    programs.add("third", wait_for(programs.folder / "second.log") + "time.sleep(1.5); print('three')", leader=True)
    programs.listed = [replace(each, title=each.name if each.leader else "") for each in programs.listed]
    shown: list[str] = []
    assert await supervise(programs, show=shown.append) == 1
    assert programs.alive() == []
    assert "drained" in programs.log("server")
    assert [line for line in messages if "Other runs go on" in line]
    assert [line.split()[1] for line in messages if "is done" in line] == ["second", "third"]
    assert {"second | two\n", "third | three\n"} <= set(shown)


@pytest.mark.parametrize("code", [0, 3])
async def test_the_programs_go_on_for_the_runs_of_others_after_the_last_leader(
    programs: Programs, messages: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(supervise_module, "LOST_POLL_S", 0.05)
    programs.add("server", SLEEP)
    programs.add("own", f"sys.exit({code})", leader=True)
    others = ["run_letters"]
    supervising = asyncio.create_task(Supervisor(programs.listed, grace=Grace(), show=str, guests=lambda: others).run(
        asyncio.Event()
    ))  # fmt: skip
    await until(lambda: any("the mesh goes on for run_letters, and ends after them" in line for line in messages))
    await until(lambda: programs.alive() == ["server"])  # which may come up after the leader has ended
    others.clear()
    assert await supervising == min(code, 1)
    assert gone(programs)


@pytest.mark.parametrize("how", ["deleted", "deleted and made again", "moved", "deleted, and a program dies of it"])
async def test_a_run_whose_folder_is_lost_ends_and_names_it(
    programs: Programs,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    how: str,
) -> None:
    monkeypatch.setattr(supervise_module, "LOST_POLL_S", 0.1 if "dies" not in how else 3600.0)
    folder = tmp_path_factory.mktemp("outputs") / "run"
    (folder / "configs").mkdir(parents=True)
    (folder / "rl.lock").touch()
    programs.add("leader", "print('ready', flush=True)\n" + SLEEP, leader=True)
    last = f"import pathlib, time\nwhile pathlib.Path({str(folder)!r}).exists(): time.sleep(0.05)\nraise SystemExit(1)"
    programs.add("server", last if "dies" in how else DRAINS + SLEEP)
    supervisor = Supervisor(
        programs.listed, grace=Grace(failure_s=1.0), show=str, landmarks=(folder / "rl.lock", folder / "configs")
    )
    running = asyncio.create_task(supervisor.run(asyncio.Event()))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: any("started server" in line for line in messages))
        (folder / "rl.lock").unlink()  # by hand: the folder is there
        await asyncio.sleep(0.5)
        assert not running.done()
        if how == "moved":
            folder.rename(folder.with_name("elsewhere"))
        else:
            shutil.rmtree(folder)
        if "made again" in how:  # by a program that writes on
            (folder / "state").mkdir(parents=True)
        assert await running == 1
    assert gone(programs)
    (error,) = [line for line in messages if line.startswith("ERROR")]
    assert error.startswith(f"ERROR the output folder {folder} was deleted or moved while the run was going on")


@pytest.mark.skipif(sys.platform != "linux", reason="what left its session is found by /proc")
@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_what_left_its_programs_session_ends_with_the_run(programs: Programs, end: str) -> None:
    child = CHILD.format(code=UP + STUBBORN + SLEEP).replace("'.child'])", "'.child'], start_new_session=True)")
    programs.add("server", child + ("os.kill(os.getpid(), 9)" if end == "killed" else DRAINS + SLEEP))
    programs.add("leader", wait_for(programs.folder / "server.child"), leader=True)
    await supervise(programs)
    assert gone(programs)


async def test_leaders_log_is_shown_and_kept(programs: Programs) -> None:
    shown: list[str] = []
    programs.add("leader", "print('step 1 ü', flush=True); time.sleep(0.1); sys.stderr.write('step 2\\n')", leader=True)
    programs.add("server", DRAINS + "print('quiet', flush=True)\n" + SLEEP)
    assert await supervise(programs, show=shown.append) == 0
    assert "".join(shown) == programs.log("leader") == "step 1 ü\nstep 2\n"


async def test_earlier_runs_lines_are_kept_but_not_shown_again(programs: Programs) -> None:
    shown: list[str] = []
    (programs.folder / "leader.log").write_text("earlier\n")
    programs.add("leader", "print('now')", leader=True)
    assert await supervise(programs, show=shown.append) == 0
    assert ("".join(shown), programs.log("leader")) == ("now\n", "earlier\nnow\n")


@pytest.mark.parametrize("victim", ["server", "leader"])
async def test_killed_program_ends_the_run_and_is_named_with_its_last_lines(
    programs: Programs, messages: list[str], victim: str
) -> None:
    lines = "".join(f"print('line {n}')\n" for n in range(30)) + "sys.stdout.flush()\n"
    for name in ("server", "other", "leader"):
        programs.add(name, (lines if name == victim else "") + SLEEP, leader=name == "leader")
    running = asyncio.create_task(supervise(programs))
    await programs.up("server", "other", "leader")
    await until(lambda: "line 29" in programs.log(victim))
    programs.kill(victim)
    assert await running == 1
    assert programs.alive() == []
    [error] = [message for message in messages if message.startswith("ERROR")]
    assert error.startswith(
        f"ERROR {victim} died: was killed by SIGKILL (9). Ending all other programs. Last lines of "
    )
    assert [line.strip() for line in error.splitlines()[1:]] == [f"line {n}" for n in range(10, 30)]


@pytest.mark.parametrize(("code", "words"), [("sys.exit(3)", "exit code 3"), ("", "exit code 0")])
async def test_server_that_ends_by_itself_ends_the_run(
    programs: Programs, messages: list[str], code: str, words: str
) -> None:
    programs.add("server", code)
    programs.add("leader", SLEEP, leader=True)
    assert await supervise(programs) == 1
    assert programs.alive() == []
    assert any(message.startswith(f"ERROR server died: ended with {words}.") for message in messages)


async def test_leader_that_fails_ends_the_run(programs: Programs, messages: list[str]) -> None:
    programs.add("server", DRAINS + SLEEP)
    programs.add("leader", "time.sleep(0.2); sys.exit('no signal left')", leader=True)
    assert await supervise(programs) == 1
    [error] = [message for message in messages if message.startswith("ERROR")]
    assert error.startswith("ERROR leader died: ended with exit code 1.")
    assert error.endswith("\n    no signal left\n")


async def test_program_that_dies_right_after_the_leader_failed_is_taken_to_be_why(
    programs: Programs, messages: list[str]
) -> None:
    leader = programs.folder / "leader"
    programs.add("leader", wait_for(programs.folder / "trainer.log") + "sys.exit('the trainer failed')", leader=True)
    sees_it_go = f"while os.path.exists('/proc/' + open({str(leader)!r}).read()): time.sleep(0.01)\n"
    programs.add("trainer", "print('up', flush=True)\n" + wait_for(leader) + sees_it_go + "sys.exit(1)")
    assert await supervise(programs, cause_s=DEADLINE_S) == 1
    [error] = [message for message in messages if message.startswith("ERROR")]
    assert error.startswith("ERROR trainer died: ended with exit code 1.")


async def test_stop_drains_every_program_clients_first(programs: Programs) -> None:
    order = programs.folder / "order.log"
    note = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(order)!r}, 'a').write(NAME), sys.exit(0)))\n"
    for name, stage in (("hub", 3), ("engine", 2), ("trainer", 1), ("leader", 0)):
        ready = f"NAME = '{name} '\n{note}print('up', flush=True)\n"
        programs.add(name, ready + SLEEP, leader=name == "leader", end_stage=stage)
    stop = asyncio.Event()
    running = asyncio.create_task(supervise(programs, stop))
    await programs.up("hub", "engine", "trainer", "leader")
    await until(lambda: all("up" in programs.log(each.name) for each in programs.listed))
    stop.set()
    assert await running == 0
    assert order.read_text() == "leader trainer engine hub "
    assert programs.alive() == []


async def test_program_that_does_not_drain_is_killed_after_the_grace(programs: Programs, messages: list[str]) -> None:
    programs.add("server", STUBBORN + "print('up', flush=True)\n" + SLEEP)
    programs.add("leader", wait_for(programs.folder / "server.log"), leader=True)
    assert await supervise(programs, shutdown_s=0.3) == 1
    assert programs.alive() == []
    assert "ERROR server did not end within 0.3 s and was killed\n" in messages


async def test_failure_while_draining_is_a_failed_run(programs: Programs, messages: list[str]) -> None:
    fails = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\nprint('up', flush=True)\n"
    programs.add("trainer", fails + SLEEP)
    programs.add("leader", wait_for(programs.folder / "trainer.log"), leader=True)
    assert await supervise(programs) == 1
    assert any("trainer ended with exit code 4 while the run was ending" in message for message in messages)


async def test_children_of_programs_end_with_them(programs: Programs) -> None:
    grandchild = UP + STUBBORN + SLEEP
    programs.add("server", CHILD.format(code=grandchild) + SLEEP)
    programs.add("leader", SLEEP, leader=True)
    running = asyncio.create_task(supervise(programs))
    await programs.up("server", "server.child", "leader")
    programs.kill("server")
    assert await running == 1
    assert gone(programs)


async def test_engine_that_may_restart_is_started_again(programs: Programs, messages: list[str]) -> None:
    programs.add("engine", SLEEP, restarts=1)
    programs.add("leader", SLEEP, leader=True)
    running = asyncio.create_task(supervise(programs))
    await programs.up("engine", "leader")
    first = programs.kill("engine")
    await until(lambda: programs.pid("engine") not in (None, first))
    assert not running.done()
    programs.kill("engine")
    assert await running == 1
    assert programs.alive() == []
    assert "WARNING engine was killed by SIGKILL (9); starting it again (0 more times)\n" in messages


async def test_program_that_never_serves_is_started_three_times_and_not_for_ever(
    programs: Programs, messages: list[str]
) -> None:
    programs.add("rollout", "sys.exit('No module named verifiers')", restarts=1000)
    programs.add("leader", SLEEP, leader=True)
    assert await supervise(programs) == 1
    assert programs.alive() == []
    assert programs.log("rollout").count("No module named verifiers") == 3
    [error] = [message for message in messages if message.startswith("ERROR")]
    assert error.startswith(
        "ERROR rollout died: ended with exit code 1, the last of 3 starts in a row that ended before it served. Ending"
    )
    assert error.endswith("\n    No module named verifiers\n")


async def test_program_that_serves_between_its_deaths_has_all_its_restarts_and_each_at_once(
    programs: Programs, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.launch.supervise.RESTART_PAUSE_S", 3600.0)
    programs.add("server", "from pathlib import Path; Path(os.environ['MESHRL_READY_FILE']).touch()", restarts=4)
    programs.add("leader", SLEEP, leader=True)
    assert await supervise(programs) == 1
    assert sum("starting it again" in message for message in messages) == 4
    [error] = [message for message in messages if message.startswith("ERROR")]
    assert error.startswith("ERROR server died: ended with exit code 0. Ending")


async def test_a_program_that_comes_after_another_runs_once_that_one_serves(
    programs: Programs, messages: list[str]
) -> None:
    serve = programs.folder / "serve.log"
    says_so = "from pathlib import Path; Path(os.environ['MESHRL_READY_FILE']).touch()\n"
    programs.add("engine", wait_for(serve) + says_so + SLEEP, restarts=1)
    programs.add("trainer", SLEEP, restarts=1)
    programs.add("leader", SLEEP, leader=True)
    programs.listed[1] = replace(programs.listed[1], after=("engine",))
    stop = asyncio.Event()
    running = asyncio.create_task(supervise(programs, stop))
    await programs.up("engine", "leader")
    await asyncio.sleep(0.5)
    assert programs.pid("trainer") is None
    assert "INFO trainer starts once engine serves\n" in messages
    serve.write_text("now\n")
    await programs.up("trainer")
    first = programs.kill("trainer")
    await until(lambda: programs.pid("trainer") not in (None, first))
    stop.set()
    assert await running == 0


async def test_a_program_that_still_waits_for_another_ends_with_the_run(programs: Programs) -> None:
    programs.add("engine", SLEEP)
    programs.add("trainer", SLEEP)
    programs.add("leader", wait_for(programs.folder / "engine"), leader=True)
    programs.listed[1] = replace(programs.listed[1], after=("engine",))
    assert await supervise(programs) == 0
    assert programs.pid("trainer") is None


@pytest.mark.parametrize("passes", [True, False])
async def test_leaders_start_once_the_check_has_passed_and_all_end_if_it_has_not(
    programs: Programs, passes: bool
) -> None:
    programs.add("engine", DRAINS + SLEEP)
    programs.add("dead", "sys.exit(2)" if not passes else SLEEP)  # of what the check finds, which is told
    programs.add("leader", "", leader=True)

    async def check() -> bool:
        await programs.up("engine", "dead")
        await asyncio.sleep(0.3)
        assert programs.pid("leader") is None
        return passes

    supervisor = Supervisor(programs.listed, grace=Grace(failure_s=1.0), show=str, check=check)
    async with asyncio.timeout(DEADLINE_S):
        assert await supervisor.run(asyncio.Event()) == (0 if passes else 2)
    assert programs.alive() == []
    assert (programs.pid("leader") is not None) == passes


async def test_a_check_that_goes_on_ends_with_the_run(programs: Programs) -> None:
    programs.add("engine", SLEEP)
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def check() -> bool:
        await programs.up("engine")
        stop.set()
        try:
            await asyncio.sleep(3600.0)
        finally:
            cancelled.set()
        return True

    supervisor = Supervisor(programs.listed, grace=Grace(shutdown_s=5.0), show=str, check=check)
    async with asyncio.timeout(DEADLINE_S):
        assert await supervisor.run(stop) == 0
    assert cancelled.is_set()
    assert programs.alive() == []


async def test_restart_may_have_arguments_besides(programs: Programs) -> None:
    programs.add("trainer", f"open(sys.argv[-1], 'w').write(str(os.getpid()))\n{SLEEP}", restarts=1)
    programs.add("leader", SLEEP, leader=True)
    first = programs.listed[0]
    resumed = programs.folder / "resumed"
    programs.listed[0] = replace(first, resumed=lambda: [str(resumed)])
    stop = asyncio.Event()
    running = asyncio.create_task(supervise(programs, stop))
    await programs.up("trainer", "leader")
    programs.kill("trainer")
    await programs.up("resumed")
    stop.set()
    assert await running == 0


async def test_bad_configuration_is_not_tried_again(programs: Programs, messages: list[str]) -> None:
    programs.add("trainer", "raise SystemExit(2)", restarts=5)
    programs.add("leader", SLEEP, leader=True)
    assert await supervise(programs) == 1
    assert any("trainer died: ended with exit code 2" in message for message in messages)
    assert not any("starting it again" in message for message in messages)


async def test_program_that_cannot_be_started_ends_the_run(programs: Programs, messages: list[str]) -> None:
    programs.add("server", SLEEP)
    programs.listed.append(
        Program(name="leader", command=["/no/such"], log=programs.folder / "leader.log", leader=True)
    )
    assert await supervise(programs) == 1
    assert programs.alive() == []
    assert any("a program cannot be started" in message for message in messages)


def supervisor_process(programs: Programs, *, temporary: Path, change: str = "") -> "subprocess.Popen[bytes]":
    """A process that supervises the programs, with `change` made to its code before."""
    fields = [
        {"name": each.name, "command": list(each.command), "log": str(each.log), "leader": each.leader}
        for each in programs.listed
    ]
    code = textwrap.dedent(f"""
        import asyncio, os, pathlib, signal
        from meshrl.launch.supervise import Grace, Program, Supervisor
        programs = [Program(**fields) for fields in {fields!r}]
        programs = [Program(**{{**vars(program), 'log': pathlib.Path(program.log)}}) for program in programs]
        {change}
        supervisor = Supervisor(programs, grace=Grace(failure_s=0.5), temporary=[pathlib.Path({str(temporary)!r})])
        asyncio.run(supervisor.run(asyncio.Event()))
    """)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_program_does_not_run_before_the_guardian_knows_of_it(programs: Programs, tmp_path: Path) -> None:
    """rl is killed in the moment between the two: the program must not stay behind, unknown to everybody."""
    programs.add("leader", SLEEP, leader=True)
    dies = "Supervisor._tell_guardian = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    supervisor = supervisor_process(programs, temporary=tmp_path / "none", change=dies)
    assert supervisor.wait(DEADLINE_S) == -signal.SIGKILL
    time.sleep(1.0)  # it would write its pid meanwhile
    left = programs.pid("leader")
    if left is not None:
        os.kill(left, signal.SIGKILL)
    assert left is None


def test_nothing_is_left_when_the_supervisor_itself_is_killed(programs: Programs, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary.log"  # a name that is no program's
    (temporary / "step_1").mkdir(parents=True)
    programs.add("server", CHILD.format(code=UP + STUBBORN + SLEEP) + SLEEP)
    programs.add("leader", STUBBORN + SLEEP, leader=True)
    supervisor = supervisor_process(programs, temporary=temporary)
    try:
        asyncio.run(programs.up("server", "server.child", "leader"))
        assert programs.alive() == ["leader", "server", "server.child"]
    finally:
        supervisor.kill()
        supervisor.wait(DEADLINE_S)
    assert gone(programs)
    asyncio.run(until(lambda: not temporary.exists()))
