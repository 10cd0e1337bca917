"""Folders for a run's own user alone: their names, modes and owners, and what is refused."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.client.private import private_folder
from meshrl.core import entry
from meshrl.core.config import ConfigError
from meshrl.core.private_folders import (
    SOCKET_NAME_BYTES,
    ReadableBy,
    keep_to,
    socket_folder,
    versions_folder,
)

NOBODY = 65534


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder_is_for_its_owner_alone_also_where_it_was_readable_before(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a" / "b")) == 0o700
    (tmp_path / "lax").mkdir(mode=0o755)
    assert mode(private_folder(tmp_path / "lax")) == 0o700


def test_a_link_a_file_and_a_folder_that_others_may_write_to_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "link").symlink_to(theirs)
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="it is a link or no folder"):
        private_folder(tmp_path / "link")
    with pytest.raises(PermissionError, match="it is a link or no folder"):
        private_folder(tmp_path / "file")
    with pytest.raises(PermissionError, match="mode 0777, so that others may write to it"):
        private_folder(tmp_path / "open")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"it belongs to user {NOBODY}"):
        private_folder(tmp_path / "theirs")


def test_a_name_is_the_same_for_all_programs_of_a_run_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = versions_folder(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert versions_folder(Path("run")) == folder
    assert versions_folder(tmp_path / "other").name != folder.name
    assert folder.parent == Path("/dev/shm")
    assert len(folder.name) >= 32
    assert mode(tmp_path / "run" / "credentials") == 0o700
    (secret,) = (tmp_path / "run" / "credentials").iterdir()
    assert mode(secret) == 0o600
    secret.unlink()
    assert versions_folder(tmp_path / "run") != folder  # by the secret, not by the path


@pytest.mark.parametrize(
    ("readable_by", "modes"), [("owner", (0o700, 0o600)), ("group", (0o750, 0o640)), ("everyone", (0o755, 0o644))]
)
def test_what_a_program_writes_is_readable_as_its_configuration_allows(
    tmp_path: Path, readable_by: ReadableBy, modes: tuple[int, int]
) -> None:
    keep_to(readable_by, tmp_path / "not made yet")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == modes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_an_output_folder_of_another_user_is_refused_unless_everyone_may_read_it(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}.*--readable-by everyone"):
        keep_to("owner", tmp_path)
    keep_to("everyone", tmp_path)


def bind_longest_name(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / ("s" * SOCKET_NAME_BYTES)))


def test_sockets_fit_into_their_folder_however_long_the_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for runtime in ("", str(long), "/nowhere"):
        folder = socket_folder({"XDG_RUNTIME_DIR": runtime})
        assert mode(folder) == 0o700
        bind_longest_name(folder)
        (folder / ("s" * SOCKET_NAME_BYTES)).unlink()
        folder.rmdir()


def test_a_short_temporary_folder_is_taken_and_one_in_which_others_rename_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert socket_folder({}).parent == Path(short)
        os.chmod(short, 0o777)
        folder = socket_folder({"XDG_RUNTIME_DIR": short})
        assert folder.parent == Path("/tmp")
        folder.rmdir()


PLAYS = """
import multiprocessing, os, sys
from meshrl.core.private_folders import short_socket_paths

def work(number):
    return number + 1

if __name__ == "__main__":
    with short_socket_paths():
        context = multiprocessing.get_context("forkserver")
        with context.Pool(1) as pool:
            print(pool.apply(work, (1,)), os.environ["VLLM_RPC_BASE_PATH"], flush=True)
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["orderly", "killed"])
def test_a_fork_server_works_below_a_long_temporary_folder_and_leaves_nothing(tmp_path: Path, end: str) -> None:
    deep, script = tmp_path / ("scratch-" * 12), tmp_path / "plays.py"
    deep.mkdir()
    script.write_text(PLAYS)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        environ = {**os.environ, "TMPDIR": str(deep), "XDG_RUNTIME_DIR": short}
        command = [sys.executable, str(script), end]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120.0, env=environ)
        assert ended.stdout.split()[0] == "2", ended.stderr
        folder = Path(ended.stdout.split()[1])
        assert folder.parent == Path(short)
        deadline = time.monotonic() + 60.0
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(deep.iterdir()) == []


def test_a_home_that_another_user_has_taken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry_in_passwd() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "theirs").mkdir()
    (tmp_path / f"meshrl-home-{os.getuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(Path, "home", no_entry_in_passwd)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "")
    entry._have_home()
    home = Path(os.environ["HOME"])
    assert home.parent == tmp_path
    assert home.stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "theirs").iterdir())
