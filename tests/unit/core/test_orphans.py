"""A guardian removes what its process leaves, but nothing that somebody else uses."""

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrl.core.orphans import FolderGuardian

DEADLINE_S = 60.0
GUARDED = """
import sys
from pathlib import Path
from meshrl.core.orphans import FolderGuardian
guardian = FolderGuardian(Path(sys.argv[1]), lock_file=Path(sys.argv[2]))
print("guarded", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    (folder / "step_1").mkdir(parents=True)
    return folder


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, "-c", GUARDED, str(folder), str(tmp_path / "no.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "guarded\n"
        assert folder.exists()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()


def test_the_folder_of_a_run_that_lives_is_left_to_it(tmp_path: Path, folder: Path) -> None:
    with (tmp_path / "rl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        FolderGuardian(folder, lock_file=tmp_path / "rl.lock").close()
        assert folder.exists()
    FolderGuardian(folder, lock_file=tmp_path / "rl.lock").close()
    assert not folder.exists()
