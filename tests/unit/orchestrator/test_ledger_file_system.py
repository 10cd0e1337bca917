"""The ledger on file systems of a network: no WAL, and what was reported as written outlives a kill."""

import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ledger_audit import audit
from meshrl.cli.run_folder import open_to_read
from meshrl.core import sqlite_files
from meshrl.orchestrator.ledger.rows import RunRow
from meshrl.orchestrator.ledger.store import LedgerStore

WRITER = """
import sys
from pathlib import Path
from meshrl.core import sqlite_files
from meshrl.orchestrator.ledger.store import LedgerStore
sqlite_files.file_system = lambda folder: int(sys.argv[2])
store = LedgerStore(Path(sys.argv[1]))
store.resume(store.open(), trainer_step=0)
row = "INSERT INTO payloads SELECT ?, randomblob(50000), x''"
number = int(sys.argv[3])
while True:
    for _ in range(3):
        number += 1
        store._put(lambda db, number=number: db.execute(row, (f"{number:09}",)))
    store.flush().result(60.0)
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def mode_of(path: Path) -> tuple[str, int]:
    """Journal mode and synchronous of a connection that writes."""
    with closing(sqlite3.connect(path)) as connection:
        sqlite_files.prepare(connection, path)
        journal, synchronous = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
        )
    return journal, synchronous


def test_a_network_file_system_has_no_wal_and_a_local_one_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlite_files.network_file_system(path) is None, "temporary folders are local"
    assert mode_of(path) == ("wal", 1)
    for number, name in sqlite_files.NETWORK.items():
        monkeypatch.setattr(sqlite_files, "file_system", lambda folder, number=number: number)
        assert sqlite_files.network_file_system(path) == name
        assert mode_of(path) == ("truncate", 2)
    assert not path.with_name("ledger.sqlite-wal").exists(), "one that was in a WAL is taken out of it"


@pytest.mark.skipif(sys.platform != "linux", reason="statfs has this number on Linux alone")
def test_the_number_of_a_file_system_is_that_of_statfs() -> None:
    known = subprocess.run(["stat", "-f", "-c", "%t", "/proc", "/dev/shm"], capture_output=True, text=True, check=True)
    assert [sqlite_files.file_system(Path(one)) for one in ("/proc", "/dev/shm")] == [
        int(number, 16) for number in known.stdout.split()
    ]
    with pytest.raises(FileNotFoundError):
        sqlite_files.file_system(Path("/nowhere"))


HALF_WRITTEN = """
import os, sqlite3, sys
from pathlib import Path
from meshrl.core import sqlite_files
sqlite_files.file_system = lambda folder: 0x6969
with sqlite3.connect(sys.argv[1]) as connection:
    sqlite_files.prepare(connection, Path(sys.argv[1]))
    connection.execute("PRAGMA cache_size = 5")  # what does not fit is written before the transaction ends
    for number in range(100):
        connection.execute("INSERT INTO payloads VALUES (?, randomblob(20000), x'')", (str(number),))
    os.kill(os.getpid(), 9)
"""


def test_a_transaction_that_a_kill_cut_off_does_not_keep_the_ledger_from_being_read(path: Path) -> None:
    store = LedgerStore(path)
    store.open()
    store.begin(RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0))
    store.close()
    assert subprocess.run([sys.executable, "-c", HALF_WRITTEN, path], check=False).returncode == -signal.SIGKILL
    assert path.with_name("ledger.sqlite-journal").stat().st_size > 0
    with (
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        connection.execute("SELECT COUNT(*) FROM payloads")
    assert audit(path.parent).ok
    with closing(open_to_read(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)


@pytest.mark.parametrize("kind", [0xEF53, 0x6969], ids=["disk", "nfs"])
def test_what_was_reported_as_written_is_there_after_a_kill(path: Path, kind: int) -> None:
    chance, reported = random.Random(kind), 0
    store = LedgerStore(path)
    store.open()
    store.begin(RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0))
    store.close()
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(kind), str(reported + 1000)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 30)):
                reported = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            reported = int([str(reported), *writer.stdout.read().split()][-1])
        with closing(open_to_read(path)) as connection:  # as `meshrl rollouts` does
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            last = connection.execute("SELECT MAX(rollout_id) FROM payloads").fetchone()[0]
            assert int(last) >= reported
