"""Files that are whole or not there."""

import errno
import os

import pytest

from meshrl.core import durable


def test_a_file_takes_the_place_of_the_one_before(tmp_path):
    path = tmp_path / "state.json"
    durable.write_file(path, "old")
    durable.write_file(path, b"\x00new")
    assert path.read_bytes() == b"\x00new"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_is_broken_off_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    durable.write_file(path, "old")

    def no_room(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        durable.write_file(path, "new")
    assert path.read_text() == "old"


def test_the_bytes_and_the_name_are_flushed_in_this_order(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    durable.write_file(tmp_path / "state.json", "text")
    assert flushed == [str(tmp_path / "state.json.tmp"), str(tmp_path)]


def test_appended_bytes_follow_those_before(tmp_path):
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    durable.append(descriptor, b"one")
    durable.append(descriptor, b"two")
    os.close(descriptor)
    assert path.read_bytes() == b"onetwo"


def test_a_private_file_is_private_also_where_a_broken_attempt_left_another(tmp_path):
    path = tmp_path / "secrets.toml"
    (tmp_path / "secrets.toml.tmp").write_text("half")
    durable.write_file(path, "key = 1", mode=0o600)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("key = 1", 0o600)
    durable.write_file(tmp_path / "state.json", "open")
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    now = os.umask(0)
    os.umask(now)
    return now
