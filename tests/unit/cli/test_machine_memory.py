"""What memory a program may plan with: the machine's, or what its cgroups allow of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.machine.memory import MachineMemory, machine_memory

GIB = 2**30
GROUPS = Path("/sys/fs/cgroup")


def tree(root: Path, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal:       {64 * 2**20} kB\nMemFree:  1 kB\nMemAvailable:   {48 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_the_machines(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert machine_memory(root) == MachineMemory(total=64 * GIB, available=48 * GIB)


def test_a_container_sees_its_own_limit_at_the_top_and_files_in_memory_count_as_available(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon {2 * GIB}\ninactive_file {3 * GIB}\n",
        },
    )
    assert machine_memory(root) == MachineMemory(total=8 * GIB, available=6 * GIB, limited=True)


def test_a_job_is_limited_by_the_tightest_of_its_groups_and_their_parents(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurm/job_7"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/slurm/job_7/step_0\n",
            f"{job}/memory.max": f"{16 * GIB}\n",
            f"{job}/memory.current": f"{15 * GIB}\n",
            f"{job}/step_0/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/memory.max": f"{32 * GIB}\n",
            "sys/fs/cgroup/system.slice/memory.current": f"{20 * GIB}\n",
        },
    )
    assert machine_memory(root) == MachineMemory(total=16 * GIB, available=1 * GIB, limited=True)


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_version_1_has_files_of_its_own_names(tmp_path: Path, path: str) -> None:
    """With its own namespace or without: in a container the group's path is not below the mount."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
        },
    )
    assert machine_memory(root) == MachineMemory(total=4 * GIB, available=2 * GIB, limited=True)


@pytest.fixture
def group() -> Iterator[Path]:
    """A real cgroup of 512 MiB."""
    version_1 = (GROUPS / "memory/memory.limit_in_bytes").exists()
    folder = (GROUPS / "memory" if version_1 else GROUPS) / f"meshrl-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(2**29))
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_process_in_a_real_cgroup_finds_its_limit(group: Path) -> None:
    program = (
        f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()));"
        "from meshrl.machine.memory import machine_memory; found = machine_memory();"
        "print(found.total, found.available, found.limited)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0, check=True)
    total, available, limited = done.stdout.split()
    assert (int(total), limited) == (2**29, "True")
    assert 0 < int(available) < 2**29
