"""Is this machine fit for the programs? One home for the rules of `meshrl doctor`, of preflight and of a start."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_OPEN_FILES = 256
"""With fewer no program works."""

USUAL_OPEN_FILES = 4096
"""With fewer a run of the usual size, with hundreds of rollouts in flight, fails calls."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one look found: `ok`, `warn` (works, but may not for long) or `fail`, and what to do about it."""

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def open_files() -> Diagnosis:
    """The hard limit of open files, up to which programs raise their own: each rollout and stream takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= USUAL_OPEN_FILES:
        most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
        return Diagnosis(what="open files", state="ok", found=f"{soft} now, {most} at most")
    needs = f"a program needs at least {MIN_OPEN_FILES}, and thousands with many rollouts"
    return Diagnosis(
        what="open files",
        state="fail" if hard < MIN_OPEN_FILES else "warn",
        found=f"a process may have {hard} open files, and {needs}",
        remedy="raise the hard limit before the start (ulimit -Hn 65536, as root)",
    )


def room_of(folder: Path) -> tuple[Path, int]:
    """The nearest folder that exists, of one that need not exist yet, and the free bytes of its disk."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return place, shutil.disk_usage(place).free
