"""The agent with real processes: an orderly end, and failures at the start.

That the others end with an agent or a rank that is killed is in tests/contract/trainer.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

AGENT = """
import os, sys
from pathlib import Path
from meshrl.core.heap import loading
with loading():
    from meshrl.training.parallel.torchrun import RankAgent
agent = RankAgent("group_member", sys.argv[2:], ranks=2, log_dir=Path(sys.argv[1]), role="trainer")
sys.exit(agent.run_ranks(os.environ))
"""
# Raises the signal where torch's agent has begun the processes but has not said so yet.
TOLD = """
import signal
from meshrl.core.heap import loading
with loading():
    from torch.distributed.elastic.multiprocessing.{module} import {name} as Part
method = Part.{method}
def told(self):
    result = method(self)
    signal.raise_signal(signal.SIGTERM)
    Part.{method} = method
    return result
Part.{method} = told
"""
Start = Callable[..., "Group"]


class Group:
    def __init__(self, folder: Path, mode: str, script: str) -> None:
        self.folder = folder
        self.console = folder / "console.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        with self.console.open("wb") as out:
            self.agent = subprocess.Popen(
                [sys.executable, "-c", script, str(folder / "logs"), str(folder), mode],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def pids(self) -> dict[int, int]:
        return {int(path.stem): int(path.read_text() or 0) for path in self.folder.glob("*.pid")}

    def wait_until_met(self) -> dict[int, int]:
        end = time.monotonic() + 60
        while len(pids := self.pids()) < 2 or 0 in pids.values():
            assert self.agent.poll() is None, self.console.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        return pids

    def log(self, rank: int, stream: str = "stdout") -> str:
        (path,) = self.folder.glob(f"logs/*/attempt_0/{rank}/{stream}.log")
        return path.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    groups: list[Group] = []

    def begin(mode: str = "", script: str = AGENT) -> Group:
        groups.append(Group(tmp_path, mode, script))
        return groups[-1]

    yield begin
    for group in groups:
        if group.agent.poll() is None:
            group.agent.kill()
            group.agent.wait(60.0)


def test_sigterm_drains_rank_0_which_kept_the_others_from_giving_up_and_dismisses_them(start: Start) -> None:
    """It comes while rank 0 waits, for longer than a collective may take."""
    group = start()
    group.wait_until_met()
    group.agent.send_signal(signal.SIGTERM)
    assert group.agent.wait(60.0) == 0, group.console.read_text()
    assert group.log(0) == "rank 0 left, told 1 times\n"
    assert group.log(1) == "rank 1 left, told 0 times\n"
    assert "rank 0 left" in group.console.read_text()
    assert "rank 1 left" not in group.console.read_text()


def test_a_rank_that_fails_before_the_group_is_up_ends_it_and_its_words_are_shown(start: Start) -> None:
    group = start("early")
    assert group.agent.wait(60.0) == 1
    assert "rank 1 of trainer ended with exit code 1" in group.console.read_text()
    assert "rank 1 has a problem" in group.console.read_text()


@pytest.mark.parametrize(
    ("module", "name", "method"), [("api", "SubprocessContext", "_start"), ("tail_log", "TailLog", "start")]
)
def test_a_signal_in_the_midst_of_the_start_is_passed_on_to_the_ranks(
    start: Start, module: str, name: str, method: str
) -> None:
    group = start(script=TOLD.format(module=module, name=name, method=method) + AGENT)
    assert group.agent.wait(60.0) == 0, group.console.read_text()
    assert "Traceback" not in group.console.read_text()
    assert subprocess.run(["pgrep", "-f", str(group.folder)], capture_output=True, timeout=60.0).stdout == b""
