"""The durable log: what was appended comes back, a torn end is dropped, damage before it is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.weights.log import DecisionLog, LogError

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
