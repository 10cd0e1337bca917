"""Holds the traces of a run against its ledger: used by bench_tracing on what a tracing back-end has kept."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """A span as a back-end gives it back; ids in hexadecimal, `links` are (trace id, span id)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    attributes: dict[str, object]
    links: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.trace_id, self.span_id


@dataclass
class TraceReport:
    """What was found. A run whose traces are whole has no `problems`."""

    spans: Counter[str] = field(default_factory=Counter)
    train_links: int = 0
    ledger_rollouts: int = 0
    synced_rollouts: int = 0
    problems: list[str] = field(default_factory=list)


def trained(ledger: Path) -> dict[int, set[str]]:
    """The rollouts that each step trained, as the ledger says."""
    steps: defaultdict[int, set[str]] = defaultdict(set)
    with sqlite3.connect(f"{ledger.resolve().as_uri()}?mode=ro", uri=True) as connection:
        for step, rollout in connection.execute("SELECT step, rollout_id FROM rollouts WHERE state = 'trained'"):
            steps[step].add(rollout)
    connection.close()
    return dict(steps)


def hold_against(spans: Iterable[Span], steps: dict[int, set[str]]) -> TraceReport:
    """What is wrong with `spans`, where `steps` are the rollouts that each step trained.

    Every one of them must be linked from its step's rl.train and link to the rl.sync of each of its versions; no parent
    and no link may lead nowhere.
    """
    report = TraceReport()
    by_key = {span.key: span for span in spans}
    report.spans.update(span.name for span in by_key.values())
    report.ledger_rollouts = sum(map(len, steps.values()))
    for span in by_key.values():
        if span.parent_id and (span.trace_id, span.parent_id) not in by_key:
            report.problems.append(f"{span.name} {span.span_id} has no parent {span.parent_id}")
        lost = [key for key in span.links if key not in by_key]
        report.problems += [f"{span.name} links to {span_id}, which is nowhere" for _, span_id in lost]
    trains = {int(str(span.attributes["rl.step"])): span for span in by_key.values() if span.name == "rl.train"}
    if missing := steps.keys() - trains.keys():
        report.problems.append(f"steps {sorted(missing)} have no rl.train")
    for step, span in sorted(trains.items()):
        linked = [by_key[key] for key in span.links if key in by_key]
        report.train_links += len(linked)
        named = {str(name) for one in linked for name in _names(one)}
        if named != steps.get(step, set()):
            report.problems.append(
                f"rl.train of step {step} links to {len(named)} rollouts, the ledger has {len(steps.get(step, ()))}"
            )
        for one in linked:
            syncs = [by_key[key] for key in one.links if key in by_key and by_key[key].name == "rl.sync"]
            brought = {int(str(sync.attributes["meshrl.version"])) for sync in syncs}
            if brought >= {int(str(version)) for version in _list(one.attributes.get("meshrl.versions"))} and brought:
                report.synced_rollouts += 1
            else:
                report.problems.append(f"rollout {one.span_id} of step {step} links to the commits of {brought} only")
    return report


def _names(rollout: Span) -> list[object]:
    return _list(rollout.attributes.get("meshrl.rollout_ids"))


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
