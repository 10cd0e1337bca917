"""The folders of a run's logs: one for each start, `logs/attempt_N`; `logs/latest` is a link to the newest.

The documents' paths (`logs/trainer.log`, `logs/envs/...`) are links through `latest`, relative so that a copied folder
keeps them. Programs that are started alone write to the newest attempt, each time to a file of their own: `eval.log`,
then `eval.2.log`.

    python -m meshrl.core.telemetry.log_folder OUTPUT_DIR FOLDER

begins an attempt, makes a folder in it, and prints its path: for a batch script whose job is several processes.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from contextlib import suppress
from pathlib import Path

from meshrl.core.durable import disk_trouble
from meshrl.core.paths import Layout

BEGUN = "MESHRL_ATTEMPT_BEGUN"
"""Set for a start's programs once its attempt has begun."""

_LATEST = "latest"
_ATTEMPT = "attempt_"


def begin_attempt(layout: Layout) -> Path:
    """Makes the folder for the logs of a new start. Logs of older versions become an attempt before it. Ends the
    process with a sentence where nothing can be written."""
    logs = layout.logs
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if beside := _beside(logs):
            earlier = _new_folder(logs)
            for path in beside:
                path.rename(earlier / path.name)
        folder = _new_folder(logs)
        _link(logs / _LATEST, folder.name)
    except OSError as error:
        raise SystemExit(disk_trouble(error) or f"cannot write {logs}: {error}") from error
    return folder


def log_place(layout: Layout, *parts: str) -> Path:
    """The path of a log, or of a folder of logs, in the newest attempt, to which the documents' path is linked. Ends
    the process as `begin_attempt` does."""
    logs, plain = layout.logs, layout.logs / parts[0]
    latest = logs / _LATEST
    try:
        if latest.is_symlink():
            folder = logs / latest.readlink()
        elif logs.is_dir() and _beside(logs):
            folder = begin_attempt(layout)
        else:  # programs that are started by hand at once meet in the first one
            folder = logs / f"{_ATTEMPT}1"
            folder.mkdir(parents=True, exist_ok=True)
            _link(latest, folder.name)
        _point(plain, f"{_LATEST}/{parts[0]}")
    except OSError as error:
        raise SystemExit(disk_trouble(error) or f"cannot write {plain}: {error}") from error
    return folder.joinpath(*parts)


def own_log(layout: Layout, name: str) -> Path:
    """The same, made empty for one run of a program that is started alone."""
    first = log_place(layout, f"{name}.log")
    try:
        log = _new_file(first)
        _point(layout.log(name), f"{_LATEST}/{log.name}")
    except OSError as error:
        raise SystemExit(disk_trouble(error) or f"cannot write {first}: {error}") from error
    return log


def _new_file(first: Path) -> Path:
    for number in itertools.count(1):
        path = first if number == 1 else first.with_suffix(f".{number}{first.suffix}")
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("there is always another number")


def _beside(logs: Path) -> list[Path]:
    return [path for path in logs.iterdir() if not path.name.startswith((".", _ATTEMPT)) and not path.is_symlink()]


def _new_folder(logs: Path) -> Path:
    numbers = [path.name.removeprefix(_ATTEMPT) for path in logs.glob(f"{_ATTEMPT}*")]
    number = max((int(found) for found in numbers if found.isdecimal()), default=0) + 1
    folder = logs / f"{_ATTEMPT}{number}"
    try:
        folder.mkdir()
    except FileExistsError:
        return _new_folder(logs)
    return folder


def _point(path: Path, target: str) -> None:
    if (path.is_symlink() and str(path.readlink()) != target) or not os.path.lexists(path):
        _link(path, target)


def _link(path: Path, target: str) -> None:
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    made.symlink_to(target)
    made.replace(path)


def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    begin_attempt(layout)
    place = log_place(layout, sys.argv[2])
    place.mkdir()
    sys.stdout.write(f"{place}\n")


if __name__ == "__main__":
    main()
