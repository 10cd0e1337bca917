"""The decision log: what was saved comes back after a kill, damage anywhere is an error, another layout is refused."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hub_rules import saved_over
from meshrl.core import sqlite_files
from meshrl.weights.coordinator.states import Key, Save
from meshrl.weights.decision_log import DecisionLog, LogError

WRITER = """
import asyncio, sys
from pathlib import Path
from meshrl.core import sqlite_files
from meshrl.weights.coordinator.states import Key, Save
from meshrl.weights.decision_log import DecisionLog
sqlite_files.file_system = lambda folder: int(sys.argv[2])

async def write():
    log = DecisionLog(Path(sys.argv[1]))
    saved = await log.open()
    number = 0 if saved is None else saved.run["number"]
    while True:
        number += 1
        versions = {Key('run', 1, number): {"state": "committed", "number": number}, Key('run', 1, number - 20): None}
        groups = {number % 5: {"number": number}}
        outlives = number % 3 == 0
        await log.save(Save(run={"number": number}, versions=versions, groups=groups, outlives_power_cut=outlives))
        print(number, flush=True)

asyncio.run(write())
"""


def saves(count: int) -> list[Save]:
    """Rows that change as a hub's do: a version in one state after the other, some forgotten, and groups."""
    made = []
    for n in range(count):
        states = ("staging", "sealed", "committing", "committed")
        versions = {
            Key("run", 1, n // 4): {"state": states[n % 4], "artifact_id": f"{n:064}"},
            Key("run", 1, n // 4 - 6): None,
        }
        made.append(Save(run={"run_id": "main", "revision": n}, versions=versions, groups={n // 10: {"n": n}}))
    return made


def after(count: int) -> Save | None:
    disk = None
    for save in saves(count):
        disk = saved_over(disk, save)
    return disk


async def write(path: Path, count: int = 40) -> Path:
    log = DecisionLog(path)
    assert await log.open() is None
    for save in saves(count):
        await log.save(save)
    await log.close()
    return path


async def read(path: Path) -> Save | None:
    log = DecisionLog(path)
    try:
        return await log.open()
    finally:
        await log.close()


async def test_rows_come_back_as_they_were_saved_last(tmp_path: Path) -> None:
    path = await write(tmp_path / "sub" / "log")
    assert await read(path) == after(40)


async def test_people_read_the_states_of_versions(tmp_path: Path) -> None:
    path = await write(tmp_path / "log", 10)
    with closing(sqlite3.connect(path)) as file:
        found = file.execute("select version, state from versions").fetchall()
    assert found == [(0, "committed"), (1, "committed"), (2, "sealed")]


def killed_after(path: Path, kind: int, writes: int, number: int) -> int:
    """Kills a process after some writes; returns the number of the last one that it reported."""
    command = [sys.executable, "-c", WRITER, path, str(kind)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(writes):
            number = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        return int([str(number), *writer.stdout.read().split()][-1])


@pytest.mark.parametrize("kind", [0xEF53, 0x6969], ids=["disk", "nfs"])
async def test_a_hub_that_is_killed_in_the_middle_of_writes_loses_none_that_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr(sqlite_files, "file_system", lambda folder: kind)
    path, chance, number = tmp_path / "log", random.Random(kind), 0
    for _ in range(3):
        number = await asyncio.to_thread(killed_after, path, kind, chance.randrange(1, 80), number)
        saved = await read(path)
        assert saved is not None
        assert saved.run["number"] in (number, number + 1)  # the last one may not have been reported yet
        number = saved.run["number"]
        assert saved.versions == {
            Key("run", 1, n): {"state": "committed", "number": n} for n in range(max(1, number - 19), number + 1)
        }


async def test_a_power_cut_undoes_only_what_need_not_outlive_one(tmp_path: Path) -> None:
    log, first, second, third = DecisionLog(tmp_path / "one" / "log"), *saves(3)
    await log.open()
    await log.save(first)
    names = ("log", "log-wal")
    at_first = {name: (tmp_path / "one" / name).read_bytes() for name in names}
    await log.save(replace(second, outlives_power_cut=False))

    def left(folder: str) -> Path:
        return shutil.copytree(tmp_path / "one", tmp_path / folder)

    killed, cut = left("killed"), left("cut")
    for name in names:
        (cut / name).write_bytes(at_first[name])
    assert await read(killed / "log") == after(2)
    assert await read(cut / "log") == after(1)
    await log.save(third)
    torn = left("torn")
    for name in names:
        (torn / name).write_bytes(at_first[name])
    await log.close()
    with pytest.raises(LogError, match="its last write is number 1 of 3"):
        await read(torn / "log")


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
async def test_a_bit_that_flipped_is_an_error_or_changes_nothing(tmp_path: Path, killed: bool) -> None:
    source = tmp_path / "source"
    log = DecisionLog(source / "log")
    await log.open()
    for save in saves(40):
        await log.save(save)
    if killed:  # what it leaves is in the WAL
        left = shutil.copytree(source, tmp_path / "left")
        await log.close()
        name = "log-wal"
    else:
        await log.close()
        left = source
        name = "log"
    chance, whole, refused = random.Random(0), (left / name).read_bytes(), 0
    for number in range(150):
        folder = shutil.copytree(left, tmp_path / "one")
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << number % 8
        (folder / name).write_bytes(changed)
        try:
            assert await read(folder / "log") == after(40)
        except LogError:
            refused += 1
        shutil.rmtree(folder)
    assert refused > 10


async def test_a_log_that_was_lost_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    path = await write(tmp_path / "log")
    path.unlink()
    with pytest.raises(LogError, match="it has no layout"):
        await read(path)


async def test_an_older_copy_of_one_row_is_an_error(tmp_path: Path) -> None:
    path = await write(tmp_path / "log", 9)
    with closing(sqlite3.connect(path)) as file, file:
        older = file.execute("select * from versions where version = 2").fetchone()
    log = DecisionLog(path)
    await log.open()
    await log.save(saves(10)[9])
    await log.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("update versions set row = ?, seal = ? where version = 2", older[3:5])
    with pytest.raises(LogError, match="a row of its table run does not have the digest"):
        await read(path)


async def test_a_close_while_a_cancelled_call_still_writes_waits_for_it(tmp_path: Path) -> None:
    for round_ in range(20):
        path = tmp_path / f"log{round_}"
        log = DecisionLog(path)
        await log.open()
        call = asyncio.create_task(log.save(saves(1)[0]))
        await asyncio.sleep(0)
        call.cancel()
        await log.close()
        assert await read(path) in (None, after(1))


async def test_log_has_one_owner_at_a_time(tmp_path: Path) -> None:
    log = DecisionLog(await write(tmp_path / "log"))
    await log.open()
    with pytest.raises(LogError, match="in use by another hub"):
        await read(tmp_path / "log")
    await log.close()
    assert await read(tmp_path / "log") == after(40)


async def test_folder_of_an_older_version_is_refused_with_its_layout(tmp_path: Path) -> None:
    (tmp_path / "decisions.log").write_bytes(b"MESHLOG1")
    with pytest.raises(LogError, match=r"decisions.log has layout 1, but this version of meshrl reads layout 4 alone"):
        await read(tmp_path / "decisions.sqlite")


@pytest.mark.parametrize("layout", [3, 5], ids=["older", "newer"])
async def test_file_of_another_version_is_refused_with_its_layout(tmp_path: Path, layout: int) -> None:
    path = await write(tmp_path / "log")
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"pragma user_version = {layout}")
    with pytest.raises(LogError, match=f"has layout {layout}, but this version of meshrl reads layout 4 alone"):
        await read(path)


async def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"something else entirely" * 100)
    with pytest.raises(LogError, match="file is not a database"):
        await read(tmp_path / "log")
