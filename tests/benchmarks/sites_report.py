"""What `bench_sites` prints: the things that happened, the ledger, staleness, and rewards beside those of one host."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from meshrl.orchestrator.ledger.audit import audit

LAW = 8
"""Versions that a rollout may be behind the policy that trains it: the default of max_off_policy_steps."""
PIECES = 8
RELAYED = r"(?m)^(\S+) .*version \d+ is here: (\d+) bytes came, it has (\d+), artifact (\w+)"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a site: how long it lasted, and how long the site then took to work again."""

    at_s: float
    site: str
    text: str
    away_s: float
    back_s: float
    steps: int
    """That the run made from its beginning until the site worked again."""

    def line(self) -> str:
        minutes, seconds = divmod(round(self.at_s), 60)
        row = (f"{minutes}:{seconds:02d}", self.site, self.text, f"{self.away_s:.0f}", f"{self.back_s:.0f}", self.steps)
        return f"| {' | '.join(map(str, row))} |"


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The records of its steps."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = (json.loads(line) for line in lines if line.endswith("}"))
    return [record for record in records if "time/step" in record]


def show(run: Path, beside: Path | None) -> int:
    """Prints the tables; 1 where a rollout was lost or counted twice, or the law was broken."""
    told = json.loads((run / "sites.json").read_text())
    steps, report = read_steps(run), audit(run)
    events = [Event(**each) for each in json.loads((run / "events.json").read_text())]
    print("\n| at | site | what | away, s | until it worked, s | steps meanwhile |\n|---|---|---|---|---|---|")
    print("\n".join(each.line() for each in events))
    states = ", ".join(f"{count} {state} {reason}".strip() for (state, reason), count in sorted(report.counts.items()))
    oldest = max(record["off_policy/all/max"] for record in steps)
    lags = [record["weights/lag_s"] for record in steps if record.get("weights/lag_s") is not None]
    size = median(record["weights/bytes"] for record in steps if record.get("weights/bytes"))
    rows: list[tuple[str, object]] = [
        ("minutes, steps", f"{told['seconds'] / 60:.1f}, {len(steps)}"),
        ("seconds a step: median, most", f"{spread([record['time/step'] for record in steps], ends=True)}"),
        ("rollouts in the ledger", states),
        ("lost, counted twice, other violations", verdict(report.violations)),
        ("staleness: mean, most", f"{fmean(record['off_policy/all/mean'] for record in steps):.2f}, {oldest:.0f}"),
        ("staleness that the law allows", LAW),
        ("bytes of a version", f"{size:,.0f}"),
        ("seconds from its upload until it was active: median, 90% of them, most", spread(lags)),
    ]
    for site, bytes_of in told["lines"].items():
        rows.append((f"MB to and from site {site}", f"{bytes_of['down'] / 1e6:.1f}, {bytes_of['up'] / 1e6:.1f}"))
    for site, (came, needed, most) in fetched(run.parent).items():
        rows.append((f"versions' bytes fetched by relay {site}, of those needed", f"{came:,}, {came / needed:.3f}"))
        rows.append(("the most versions fetched there until a start served its first", most))
    rows.append(("exit code of the orchestrator", told["code"]))
    print("\n| | |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows))
    rewards(steps, [] if beside is None else read_steps(beside / "origin"))
    return int(bool(report.violations) or oldest > LAW or told["code"] != 0)


def fetched(folder: Path) -> dict[str, tuple[int, int, int]]:
    """By site: the bytes that its relay fetched, those of the versions among them, each of them once a start, and the
    most versions that a start of it fetched before its engine served one."""
    found: dict[str, tuple[int, int, int]] = {}
    for place in sorted(folder.glob("site_*")):
        came = needed = most = 0
        engines = [path.read_text(errors="replace") for path in place.glob("engine_*.txt")]
        served = sorted(at for console in engines for at in re.findall(r"(?m)^(\S+) .*is served", console))
        for console in (path.read_text(errors="replace") for path in sorted(place.glob("relay_*.txt"))):
            first = next((at for at in served if at > console.partition(" ")[0]), "~")  # comes after every time
            before = 0
            seen: set[str] = set()
            for at, bytes_came, size, artifact in re.findall(RELAYED, console):
                came += int(bytes_came)
                needed += int(size) * (artifact not in seen)
                seen.add(artifact)
                before += at < first
            most = max(most, before)
        if needed:
            found[place.name.removeprefix("site_")] = (came, needed, most)
    return found


def verdict(violations: tuple[str, ...]) -> str:
    return "0, 0, 0: exact" if not violations else "; ".join(violations[:5])


def spread(values: list[float], *, ends: bool = False) -> str:
    """Median, what 90% are below, and the most; with `ends` the median and the most."""
    ordered = sorted(values)
    shown = (median(ordered), *(() if ends else (ordered[int(0.9 * (len(ordered) - 1))],)), ordered[-1])
    return ", ".join(f"{value:.1f}" for value in shown)


def rewards(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Mean rewards of the same pieces of both runs."""
    count = len(steps)
    edges = [round(piece * count / PIECES) for piece in range(PIECES + 1)]
    print("\n| steps | reward, three sites | reward, one host |\n|---|---|---|")
    for begin, end in pairwise(edges):
        cells = [mean_reward(each[begin:end]) for each in (steps, others)]
        print(f"| {begin + 1} to {end} | {cells[0]} | {cells[1]} |")


def mean_reward(steps: list[dict[str, Any]]) -> str:
    return f"{fmean(record['reward/all/mean'] for record in steps):.3f}" if steps else ""
