"""One rl at a time has an output folder, and the others hear who it is."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshrl.core.paths import Layout
from meshrl.core.run_folder import empty_folder, holds_a_run
from meshrl.launch.lock import FolderInUseError, FolderLock
from meshrl.launch.main import main

HOLD = """
import sys, time
from pathlib import Path
from meshrl.core.paths import Layout
from meshrl.launch.lock import FolderLock
with FolderLock(Layout(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> "subprocess.Popen[str]":
    """Another process that has the folder until its stdin ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_second_is_told_who_has_the_folder_and_gets_it_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with hold(folder) as holder:
        with pytest.raises(FolderInUseError) as refused, FolderLock(Layout(folder)):
            pass
        since = json.loads((folder / "rl.lock").read_text())["since"]
        assert str(refused.value) == (
            f"output_dir: {folder} is in use by rl (pid {holder.pid} on {platform.node()}, since {since});"
            " wait for its end, stop it, or choose another output_dir"
        )
        holder.communicate()
    with FolderLock(Layout(folder)):
        assert json.loads((folder / "rl.lock").read_text())["pid"] == os.getpid()
    assert not folder.exists()  # nothing was written there


def test_a_folder_is_the_same_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with FolderLock(Layout(tmp_path / "run")), pytest.raises(FolderInUseError), FolderLock(Layout(tmp_path / "link")):
        pass


def test_the_lock_of_a_killed_rl_is_waited_for(tmp_path: Path) -> None:
    """Its guardian has the file open until the programs have ended; here that is this process."""
    with hold(tmp_path) as holder:
        holder.kill()
    guardian = os.open(tmp_path / "rl.lock", os.O_RDWR)
    fcntl.flock(guardian, fcntl.LOCK_EX)
    entered = threading.Event()

    def enter() -> None:
        with FolderLock(Layout(tmp_path)):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert not entered.wait(0.5)
    os.close(guardian)
    waiting.join(60.0)
    assert entered.is_set()


@pytest.mark.parametrize("folder", [".", "made_and_removed"])
def test_who_waits_never_locks_a_file_that_its_holder_has_removed(tmp_path: Path, folder: str) -> None:
    """Many threads take turns; were a removed file locked, two would be inside at once."""
    inside, most, ended = 0, 0, 0

    def take_turns() -> None:
        nonlocal inside, most, ended
        turns = 0
        while turns < 40:
            try:
                with FolderLock(Layout(tmp_path / folder)):
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0.0001)
                    inside -= 1
                    turns += 1
            except FolderInUseError:
                time.sleep(0.0001)
        ended += 1

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert (most, ended) == (1, 4)


def test_a_folder_that_is_removed_while_it_is_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, calls = os.mkdir, []

    def made_by_another_that_removes_it(path: Path, mode: int = 0o777) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", made_by_another_that_removes_it)
    with FolderLock(Layout(tmp_path / "run")):
        assert len(calls) == 2


def test_the_lock_is_no_run_and_is_not_cleaned_away(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with FolderLock(Layout(tmp_path)):
        empty_folder(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["rl.lock"]
        assert not holds_a_run(tmp_path)


@pytest.mark.parametrize(("flags", "code"), [((), 2), (("--clean-output-dir",), 2), (("--dry-run",), 0)])
def test_nothing_is_written_where_another_rl_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    code: int,
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "trainer.toml").write_text("of the living run")
    before = sorted(tmp_path.rglob("*"))
    argv = ["rl", "--orchestrator.train.env.0.id", "reverse_text", "--inference", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--no-preflight", *flags])
    with hold(tmp_path) as holder:
        with pytest.raises(SystemExit) as leaving:
            main()
        said = capsys.readouterr()
        assert leaving.value.code == code
        assert f"{tmp_path} is in use by rl (pid {holder.pid} on " in (said.err if code else said.out)
        assert (tmp_path / "configs" / "trainer.toml").read_text() == "of the living run"
        assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "rl.lock"] == before
        holder.communicate()
