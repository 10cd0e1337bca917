"""The durable log: what was appended comes back, a torn end is dropped, damage anywhere is an error."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshrl.weights.storage.log import DecisionLog, LogError

ENTRIES: list[dict[str, Any]] = [{"kind": "staged", "version": n, "text": "x" * n} for n in range(5)]


def written(path: Path) -> Path:
    log = DecisionLog(path)
    assert log.open() == []
    for entry in ENTRIES:
        log.append(entry)
    log.close()
    return path


def read(path: Path) -> list[Any]:
    log = DecisionLog(path)
    try:
        return list(log.open())
    finally:
        log.close()


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    assert read(written(tmp_path / "sub" / "log")) == ENTRIES


def test_append_cut_short_at_any_byte_is_dropped_and_writing_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = path.read_bytes()
    last = len(whole) - len(b'{"kind":"staged","version":4,"text":"xxxx"}') - 12
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert read(path) == ENTRIES[:4]
        log = DecisionLog(path)
        log.open()
        log.append(ENTRIES[4])
        log.close()
        assert read(path) == ENTRIES


def test_zeros_after_the_end_are_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    path.write_bytes(path.read_bytes() + bytes(100))
    assert read(path) == ENTRIES


def test_damage_before_the_last_entry_is_an_error_wherever_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = bytearray(path.read_bytes())
    last = len(whole) - len(b'{"kind":"staged","version":4,"text":"xxxx"}') - 12
    for at in range(8, last):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(LogError, match="damaged at byte"):
            read(path)
        assert path.read_bytes() == damaged  # left as it is, for whoever repairs it


def test_damage_in_the_last_entry_is_an_error_wherever_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = bytearray(path.read_bytes())
    last = len(whole) - len(b'{"kind":"staged","version":4,"text":"xxxx"}') - 12
    for at in range(last, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(LogError, match=rf"{path} is damaged at byte {last}, in its last entry; restore it"):
            read(path)
        assert path.read_bytes() == damaged


def test_last_entry_whose_end_was_never_written_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = path.read_bytes()
    last = len(whole) - len(b'{"kind":"staged","version":4,"text":"xxxx"}') - 12
    for end in range(last + 12, len(whole)):
        path.write_bytes(whole[:end] + bytes(len(whole) - end))
        assert read(path) == ENTRIES[:4]


def test_compacted_log_holds_the_new_entries_and_goes_on(tmp_path: Path) -> None:
    log = DecisionLog(written(tmp_path / "log"))
    log.open()
    log.compact(ENTRIES[:2])
    log.append(ENTRIES[4])
    with pytest.raises(LogError, match="in use by another hub"):
        DecisionLog(tmp_path / "log").open()
    log.close()
    assert read(tmp_path / "log") == [*ENTRIES[:2], ENTRIES[4]]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


class KilledError(BaseException):
    """Nothing after this runs, as in a process that is gone."""


def killed_while_compacting(log: DecisionLog, step: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends `compact` before or after one of its system calls, and closes what the process had open."""
    fds = [log._fd]
    really_open, really_do = os.open, getattr(os, step)

    def opened(*arguments: Any, **more: Any) -> int:
        fds.append(really_open(*arguments, **more))
        return fds[-1]

    def kill(*arguments: Any, **more: Any) -> None:
        if after:
            done = opened if step == "open" else really_do
            done(*arguments, **more)
            if step == "close":
                fds.remove(arguments[0])
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, step, kill)
        with pytest.raises(KilledError):
            log.compact([{"kind": "snapshot"}])
    for fd in set(fds):
        with suppress(OSError):  # it was closed before the end
            os.close(fd)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["open", "write", "fdatasync", "replace", "close", "fsync"])
def test_hub_killed_at_any_point_of_compacting_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    path = written(tmp_path / "log")
    log = DecisionLog(path)
    log.open()
    killed_while_compacting(log, step, after, monkeypatch)
    renamed = step in ("close", "fsync") or (step, after) == ("replace", True)
    assert read(path) == ([{"kind": "snapshot"}] if renamed else ENTRIES)
    assert [left.name for left in tmp_path.iterdir()] == ["log"]


def test_log_that_cannot_be_compacted_goes_on_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    log = DecisionLog(path)
    log.open()
    (tmp_path / "log.new").mkdir()  # where the new file should go
    log.compact([{"kind": "snapshot"}])
    log.append({"kind": "one more"})
    log.close()
    (tmp_path / "log.new").rmdir()
    assert read(path) == [*ENTRIES, {"kind": "one more"}]


def test_log_has_one_owner_at_a_time(tmp_path: Path) -> None:
    first = DecisionLog(written(tmp_path / "log"))
    first.open()
    with pytest.raises(LogError, match="in use by another hub"):
        DecisionLog(tmp_path / "log").open()
    first.close()
    assert read(tmp_path / "log") == ENTRIES


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"something else entirely")
    with pytest.raises(LogError, match="not a log"):
        read(tmp_path / "log")
