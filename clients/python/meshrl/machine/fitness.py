"""Rules of a fit machine, for `meshrl doctor`, preflight and a start."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_OPEN_FILES = 256
USUAL_OPEN_FILES = 4096
"""For hundreds of rollouts in flight."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`warn` works, but may not for long."""

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def open_files() -> Diagnosis:
    """Judged by the hard limit, up to which programs raise their own."""
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
    """The nearest existing folder, and its disk's free bytes."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return place, shutil.disk_usage(place).free
