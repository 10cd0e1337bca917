"""`meshrl logs`: the logs of a run's programs, merged by time, and followed."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import deque
from os import SEEK_END
from pathlib import Path

import click

from meshrl.cli.command import CliError, folder_option
from meshrl.cli.run_folder import RunFolder, log_line
from meshrl.wire.growing_file import GrowingFile

FOLLOW_S = 0.5
TAIL_BYTES = 2**20  # of each log, in which its last lines are looked for


@click.command()
@click.argument("programs", nargs=-1)
@folder_option
@click.option("-s", "--service", "services", multiple=True, help="The same as a PROGRAM; may be given again.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=20, show_default=True, help="Last lines of each log."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, also of the next start, until Ctrl-C.")
@click.option("-a", "--attempt", type=int, help="The logs of this start of the run, from 1; the newest is shown else.")
def logs(
    programs: tuple[str, ...],
    folder: RunFolder,
    services: tuple[str, ...],
    lines: int,
    follow: bool,
    attempt: int | None,
) -> None:
    """Print the end of the log of each PROGRAM, by default of all, and what is added to it."""
    services = (*programs, *services)
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
        raise CliError(folder.lacks("logs"))
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
    except FileNotFoundError:
        return [], 0
    stamped, stamp = [], ""
    for line in kept:
        stamp = log_line(line)[0] or stamp
        stamped.append((stamp, name, line))
    return stamped, size
