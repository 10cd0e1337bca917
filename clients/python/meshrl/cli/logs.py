"""`meshrl logs`: the logs of a run's programs, merged by time, and followed."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import time
from collections import deque
from datetime import datetime, timedelta
from os import SEEK_END
from pathlib import Path

import click

from meshrl.cli.command import CliError, folder_option
from meshrl.cli.run_folder import RunFolder
from meshrl.wire.growing_file import GrowingFile

FOLLOW_S = 0.5
HALF_A_DAY_H = 12
TAIL_BYTES = 2**20  # of each log, in which its last lines are looked for


@click.command()
@folder_option
@click.option("-s", "--service", "services", multiple=True, help="Only this program's logs; may be given again.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=20, show_default=True, help="Last lines of each log."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, also of the next start, until Ctrl-C.")
@click.option("-a", "--attempt", type=int, help="The logs of this start of the run, from 1; the newest is shown else.")
def logs(folder: RunFolder, services: tuple[str, ...], lines: int, follow: bool, attempt: int | None) -> None:
    """Print the end of each program's log, and what is added to it."""
    found = _chosen(folder, services, attempt)
    ends = [_stamped(name, path, lines) for name, path in found.items()]
    read = {path: GrowingFile(path, end) for path, (_, end) in zip(found.values(), ends, strict=True)}
    for _, name, line in heapq.merge(*(stamped for stamped, _ in ends)):
        click.echo(f"{name:14} {line}")
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            time.sleep(FOLLOW_S)
            for name, path in folder.logs(attempt).items():  # of a start that has just begun, maybe without some
                if services and _program(name) not in services and name not in services:
                    continue
                for added in read.setdefault(path, GrowingFile(path)).read_on():
                    click.echo(f"{name:14} {added.decode(errors='replace')}")


def _chosen(folder: RunFolder, services: tuple[str, ...], attempt: int | None) -> dict[str, Path]:
    attempts = folder.attempts()
    if attempt is not None and attempt not in attempts:
        there_are = ", ".join(map(str, attempts)) or "none"
        raise CliError(f"no attempt {attempt} in {folder.path / 'logs'}; there are: {there_are}")
    found = folder.logs(attempt)
    if not found:
        raise CliError(f"{folder.path} has no logs: name a run's output folder with -o")
    named = {*found, *map(_program, found)}
    if unknown := [service for service in services if service not in named]:
        raise CliError(f"no log of {', '.join(unknown)} in {folder.path}; there are: {', '.join(found)}")
    return {name: path for name, path in found.items() if not services or {name, _program(name)} & {*services}}


def _program(name: str) -> str:
    """`eval` for `eval.2`."""
    program, _, number = name.rpartition(".")
    return program if number.isdecimal() else name


def _stamped(name: str, path: Path, number: int) -> tuple[list[tuple[str, str, str]], int]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, SEEK_END)
            begin = file.seek(max(0, size - TAIL_BYTES))
            kept = deque(file.read(size - begin).decode(errors="replace").splitlines(), maxlen=number)
            written = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return [], 0
    times, stamp = [], ""
    for line in kept:
        stamp = _time_of(line) or stamp
        times.append(stamp)
    stamped, day, hour = [], written.date(), written.hour
    for line, stamp in zip(reversed(kept), reversed(times), strict=True):  # lines have no date, the file's last has
        if stamp and int(stamp[:2]) - hour > HALF_A_DAY_H:
            day -= timedelta(days=1)
        hour = int(stamp[:2]) if stamp else hour
        stamped.append((f"{day} {stamp}", name, line))
    return stamped[::-1], size


def _time_of(line: str) -> str:
    if line.startswith("{"):
        try:
            return str(json.loads(line)["record"]["time"]["repr"])[11:23]
        except (ValueError, KeyError, TypeError):
            return ""
    return line[:12] if line[2:3] == ":" else ""
