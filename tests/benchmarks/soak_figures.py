"""What `bench_soak` measures and how it judges: /proc of the five programs, the parts of an output folder, and rules of
flatness. Starts nothing.

Three kinds of figures: a `level` (memory, files, threads) must not grow with the steps, a `total` (disk, CPU seconds)
must grow by the same amount a step for ever, a `bounded` total (traces) must stay below a bound.

A level is flat when the robust line through its values rises by no more than the bound a step, or when all that the
line rises over the whole run is less than the scatter of the values around it: memory goes up and down by megabytes
between two collections of garbage, and what is below that cannot be told from nothing.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROGRAMS = ("orchestrator", "rollout", "trainer", "weights", "inference")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
MOST_POINTS = 600
"""Points that a fit uses; its pairs grow with the square."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One look at a process. `files` counts open descriptors by kind.

    `own_kb` is what it allocated, `mapped_kb` what it maps of shared memory and of files; PSS shares the latter between
    all that map it, so it moves when a neighbour starts or ends.
    """

    rss_kb: int
    pss_kb: int
    own_kb: int
    mapped_kb: int
    threads: int
    cpu_s: float
    files: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at a run: the last step with a record, its processes, and bytes on disk by part."""

    step: int
    at_s: float
    processes: Mapping[str, Process]
    disk: Mapping[str, int] = field(default_factory=dict)

    def value(self, figure: str) -> float | None:
        """The value of a figure such as `rollout rss_kb` or `disk traces`; None where it was not seen."""
        owner, _, name = figure.partition(" ")
        if owner == "disk":
            return self.disk.get(name)
        process = self.processes.get(owner)
        if process is None:
            return None
        return float(sum(process.files.values()) if name == "files" else getattr(process, name))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A figure, how it is read, and the most that it may grow.

    level: units a step, of the slope. total: the slope of the later half over that of the half before. bounded: the
    most it may ever be.
    """

    figure: str
    kind: str
    bound: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A rule's outcome: `measured` is compared with the rule's bound; `a_step` is the growth a step after the start and
    `scatter` how far nine in ten values are from its line, at most."""

    rule: Rule
    measured: float
    a_step: float
    scatter: float
    values: Mapping[int, float]
    flat: bool


def look_at(pid: int) -> Process | None:
    """Reads /proc of a process; None once it is gone."""
    proc = Path(f"/proc/{pid}")
    try:
        after_name = (proc / "stat").read_text().rpartition(")")[2].split()
        status = _kilobytes(proc / "status")
        rollup = _kilobytes(proc / "smaps_rollup")
        kinds = Counter(_kind(entry) for entry in (proc / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):  # it ended between two reads
        return None
    return Process(
        rss_kb=status["VmRSS"],
        pss_kb=rollup["Pss"],
        own_kb=status["RssAnon"],
        mapped_kb=status["RssFile"] + status["RssShmem"],
        threads=int(after_name[17]),
        cpu_s=(int(after_name[11]) + int(after_name[12])) / TICKS_A_SECOND,
        files=dict(kinds),
    )


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines `Name: number kB` of a file of /proc; a process that has just ended has none, as if it were gone."""
    pairs = (line.split() for line in path.read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) for words in pairs if len(words) == 3 and words[2] == "kB"}
    if not found:
        raise ProcessLookupError(f"{path} has no memory")
    return found


def _kind(descriptor: Path) -> str:
    """file, socket, pipe, eventfd and the like; closed when it went while we looked."""
    try:
        target = str(descriptor.readlink())
    except FileNotFoundError:
        return "closed"
    if target.startswith("/"):
        return "shm" if target.startswith("/dev/shm") else "file"
    kind, _, rest = target.partition(":")
    return rest.strip("[]") if kind == "anon_inode" else kind


def disk_parts(output_dir: Path) -> dict[str, int]:
    """Bytes used below an output folder by top-level name; the ledger's files count as one, and `all` as the sum."""
    parts: Counter[str] = Counter()
    for entry in output_dir.iterdir():
        name = "ledger" if entry.name.startswith("ledger.") else entry.name.partition(".")[0]
        parts[name] += _bytes_below(entry)
    return {**parts, "all": sum(parts.values())}


def _bytes_below(entry: Path) -> int:
    try:
        found = entry.lstat()
        if stat.S_ISDIR(found.st_mode):
            return sum(_bytes_below(child) for child in entry.iterdir())
    except FileNotFoundError:  # removed while we looked
        return 0
    return found.st_blocks * 512


def robust_slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the Theil-Sen line (Sen 1968): the median over pairs, which outliers below 29% do not move."""
    x_N, y_N = (np.asarray(part, dtype=np.float64) for part in (steps, values))
    if len(x_N) > MOST_POINTS:
        kept = np.linspace(0, len(x_N) - 1, MOST_POINTS).astype(int)
        x_N, y_N = x_N[kept], y_N[kept]
    first, second = np.triu_indices(len(x_N), k=1)
    apart = x_N[second] - x_N[first]
    slopes = (y_N[second] - y_N[first])[apart > 0] / apart[apart > 0]
    return float(np.median(slopes)) if len(slopes) else 0.0


def scatter_around(slope: float, steps: Sequence[float], values: Sequence[float]) -> float:
    """Distance from the line of this slope through the middle of the values that nine in ten of them keep to."""
    rest_N = np.asarray(values, dtype=np.float64) - slope * np.asarray(steps, dtype=np.float64)
    return float(np.quantile(np.abs(rest_N - np.median(rest_N)), 0.9))


def judge(rule: Rule, samples: Sequence[Sample], *, after: int, shown: Sequence[int]) -> Verdict | None:
    """Applies a rule to the samples after step `after`; None where there are fewer than three with the figure."""
    seen = [(s.step, value) for s in samples if (value := s.value(rule.figure)) is not None]
    later = [(step, value) for step, value in seen if step >= after]
    if len({step for step, _ in later}) < 3:
        return None
    slope = robust_slope(*zip(*later, strict=True))
    scatter = scatter_around(slope, *zip(*later, strict=True))
    hidden = False
    if rule.kind == "level":
        measured = slope
        hidden = slope * (later[-1][0] - later[0][0]) < scatter
    elif rule.kind == "bounded":
        measured = max(value for _, value in later)
    else:
        middle = (later[0][0] + later[-1][0]) / 2
        early = robust_slope(*zip(*(point for point in later if point[0] <= middle), strict=True))
        late = robust_slope(*zip(*(point for point in later if point[0] >= middle), strict=True))
        measured = late / early if early > 0 else float(late > 0)
    at = {want: min(seen, key=lambda point: abs(point[0] - want))[1] for want in shown}
    flat = measured <= rule.bound or hidden
    return Verdict(rule=rule, measured=measured, a_step=slope, scatter=scatter, values=at, flat=flat)


def as_json(verdicts: Sequence[Verdict], samples: Sequence[Sample]) -> dict[str, Any]:
    """The report: every verdict, and every sample it rests on."""
    return {
        "verdicts": [
            {
                "figure": verdict.rule.figure,
                "kind": verdict.rule.kind,
                "bound": verdict.rule.bound,
                "measured": verdict.measured,
                "growth_a_step": verdict.a_step,
                "scatter": verdict.scatter,
                "values": {str(step): value for step, value in verdict.values.items()},
                "flat": verdict.flat,
            }
            for verdict in verdicts
        ],
        "samples": [
            {
                "step": sample.step,
                "at_s": sample.at_s,
                "disk": dict(sample.disk),
                "processes": {name: vars(process) for name, process in sample.processes.items()},
            }
            for sample in samples
        ],
    }
