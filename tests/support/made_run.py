"""A run's output folder as a run leaves it, made by hand and as small or large as a test needs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import zstandard


def make_run(path: Path, *, steps: int) -> Path:
    """A folder with metrics and two kept rollouts of every step, and a trace of step 3."""
    (path / "configs").mkdir(parents=True)
    (path / "rollouts").mkdir()
    for step in range(1, steps + 1):
        add_step(path, step)
        with zstandard.open(path / "rollouts" / f"step_{step}.jsonl.zst", "wt", encoding="utf-8") as file:
            file.write(json.dumps(rollout(step, "worst", 0.0, "<img src=x onerror=alert(1)>")) + "\n")
            file.write(json.dumps(rollout(step, "best", 1.0, f"good {step}")) + "\n")
    add_span(path, "orchestrator", "rl.step", 100.0, 9.0, {"rl.step": 3})
    add_span(path, "trainer", "rl.train", 107.0, 1.0, {})
    return path


def add_step(path: Path, step: int) -> None:
    """One more record in metrics.jsonl."""
    record = {"step": step, "reward/all/mean": step / 10, "time/step": 1.0, "weights/lag_s": 0.05}
    record |= {"time/wait_for_batch": 0.6, "time/train_step": 1.0, "perf/engines_idle": 0.1}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def rollout(step: int, picked: str, reward: float, reply: str, tokens: int = 4) -> dict[str, Any]:
    """A line of rollouts/step_N.jsonl.zst; half of its `tokens` are the prompt's."""
    half = tokens // 2
    gaps = (0.02, -0.2, 0.0, -0.75)
    message = [{"role": "user", "text": "say", "tokens": [0, half]}]
    message += [{"role": "assistant", "text": reply, "tokens": [half, tokens]}]
    sample = {
        "token_ids": list(range(1, tokens + 1)),
        "logprobs": [None] * half + [-0.5] * (tokens - half),
        "trainer_logprobs": [None] * half + [round(-0.5 + gaps[place % 4], 5) for place in range(tokens - half)],
        "temperature": 1.0,
        "versions": [[half, tokens, step - 1]],
        "messages": message,
    }
    return {
        "picked": picked, "step": step, "advantage": reward - 0.5, "rollout_id": f"{picked}-{step}",
        "group_id": f"group-{step}", "environment": "made", "task_key": "key", "agent": "", "reward": reward,
        "reward_parts": {"right": reward}, "metrics": {}, "finish_reason": "stop", "truncated": False, "num_turns": 1,
        "timings_s": {"total": 1.0}, "trace_id": "a" * 32, "samples": [sample],
    }  # fmt: skip


def add_version(path: Path, version: int, engines: dict[str, float], base: int | None = None) -> None:
    """The traces of a version, full or a delta of `base`; `engines` took it so many seconds after its seal."""
    seal_s = 10.0 * version
    about = {"meshrl.version": version, "meshrl.artifact_id": f"content {version}"}
    kind = {"meshrl.kind": "full"} if base is None else {"meshrl.kind": "delta", "meshrl.base_version": base}
    add_span(
        path,
        "weights",
        "meshrl.v1.WeightSync/CreateVersion",
        seal_s,
        0.1,
        {**about, **kind, "meshrl.full_bytes": 8_000_000},
    )
    sent = {
        "meshrl.run_id": "main",
        "meshrl.num_bytes": 8_000_000 if base is None else 80_000,
        "meshrl.transport": "stream",
    }
    add_span(path, "weights", "rl.sync", seal_s, 0.5, {**about, **sent})
    for process, (engine, after_s) in enumerate(engines.items(), 1):
        taken = {**about, "meshrl.engine_id": engine, "meshrl.pause_s": 0.125}
        add_span(path, "inference", "rl.sync.apply", seal_s + after_s, 0.25, taken, process)


def add_ledger(path: Path, rollouts: Iterable[tuple[str, str, str, float]], *, began_s: float = 0.0) -> None:
    """A ledger of rollouts by environment, state, reason and when they came to it, of a run that began at `began_s`."""
    with closing(sqlite3.connect(path / "ledger.sqlite")) as ledger, ledger:
        ledger.execute(
            "CREATE TABLE rollouts (key TEXT PRIMARY KEY, environment TEXT, state TEXT, reason TEXT, updated_s REAL)"
        )
        ledger.execute("CREATE TABLE runs (run INTEGER PRIMARY KEY, began_s REAL NOT NULL)")
        ledger.execute("INSERT INTO runs (began_s) VALUES (?)", (began_s,))
        ledger.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?)", ((str(key), *one) for key, one in enumerate(rollouts))
        )


def add_span(
    path: Path,
    program: str,
    name: str,
    start_s: float,
    seconds: float,
    attributes: dict[str, str | int],
    process: int = 1,
) -> None:
    """One more span at the end of a program's traces."""
    span = {
        "name": name, "traceId": "a" * 32, "spanId": name, "parentSpanId": "",
        "attributes": [
            {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
            for key, value in attributes.items()
        ],
        "startTimeUnixNano": str(round(start_s * 1e9)), "endTimeUnixNano": str(round((start_s + seconds) * 1e9)),
    }  # fmt: skip
    (path / "traces").mkdir(exist_ok=True)
    with (path / "traces" / f"{program}.jsonl").open("a") as file:
        resource = {"attributes": [{"key": "process.pid", "value": {"intValue": str(process)}}]}
        file.write(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}) + "\n")
