"""Memory of this machine, or of the container or job that limits it (cgroups 1 and 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """In bytes; `available` without swapping. `limited`: a cgroup allows less than the machine has."""

    total: int
    available: int
    limited: bool = False


def machine_memory(root: Path = Path("/")) -> MachineMemory | None:
    """As far as the tightest of this process's cgroups allows; None if unknown.

    Droppable file cache counts as available. `root` is where /proc and /sys are.
    """
    found = _whole_machine(root)
    if found is None:
        return None
    total, available = found
    limits = list(_limits(root))
    least = min((limit for limit, _ in limits), default=total)
    return MachineMemory(
        total=min(total, least),
        available=max(0, min([available, *(limit - used for limit, used in limits)])),
        limited=least < total,
    )


def _whole_machine(root: Path) -> tuple[int, int] | None:
    with suppress(OSError, KeyError, ValueError):  # no Linux
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        table = {words[0]: 1024 * int(words[1]) for words in lines if len(words) > 1}
        return table["MemTotal:"], table["MemAvailable:"]
    with suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    return None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of this process's cgroups and their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    mounts = root / "sys/fs/cgroup"
    tops: tuple[Path, ...]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            tops, names = (mounts, mounts / "unified"), _V2
        elif "memory" in controllers.split(","):
            tops, names = (mounts / "memory",), _V1
        else:
            continue
        for top in tops:
            own = top / path.lstrip("/")  # not there in a container that sees its own group as the top
            for folder in (own, *own.parents):
                if not folder.is_relative_to(top):
                    break
                with suppress(OSError, ValueError):  # none here, or "max", which is no limit
                    yield _read(folder, *names)


def _read(folder: Path, limit_name: str, used_name: str, droppable_name: str) -> tuple[int, int]:
    limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
    with suppress(OSError, ValueError):
        words = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= {name: int(value) for name, value in words}.get(droppable_name, 0)
    return limit, used
