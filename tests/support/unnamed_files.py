"""The files without a name that a process has open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def unnamed_files(folder: Path, pid: int | None = None) -> set[int]:
    """Inodes of those that were made in `folder`; of this process, unless another is named."""
    found = set()
    for opened in Path(f"/proc/{pid or os.getpid()}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = Path(os.readlink(opened))
            if target.parent == folder and target.name.endswith(" (deleted)"):
                found.add(opened.stat().st_ino)
    return found
