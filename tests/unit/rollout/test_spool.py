"""The spool of a worker that dials in is never closed under a write."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.rollout.exchange.outbox import SpooledEvent
from meshrl.rollout.exchange.spool import ResultSpool

EVENT = SpooledEvent("call", 1, b"message", False)
DEADLINE_S = 60.0


def test_closing_waits_for_a_write_on_another_thread(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path / "spool")
    writing, go_on = threading.Event(), threading.Event()

    def forget() -> Iterator[tuple[str, int | None]]:
        writing.set()
        assert go_on.wait(DEADLINE_S)
        yield "another call", None

    write = threading.Thread(target=spool.write, args=([EVENT], forget()))
    close = threading.Thread(target=spool.close)
    write.start()
    assert writing.wait(DEADLINE_S)
    close.start()
    close.join(0.2)
    assert close.is_alive()
    go_on.set()
    write.join(DEADLINE_S)
    close.join(DEADLINE_S)
    again = ResultSpool(tmp_path / "spool")
    assert again.read() == [EVENT]
    again.close()


def test_a_write_after_the_close_is_an_error(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path / "spool")
    spool.close()
    with pytest.raises(sqlite3.Error, match="closed"):
        spool.write([EVENT])
