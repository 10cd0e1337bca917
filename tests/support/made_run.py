"""A run's output folder as a run leaves it, made by hand and as small or large as a test needs."""

from __future__ import annotations

import json
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
    _write_span(path, "orchestrator", "rl.step", 100.0, 9.0, [{"key": "rl.step", "value": {"intValue": "3"}}])
    _write_span(path, "trainer", "rl.train", 107.0, 1.0, [])
    return path


def add_step(path: Path, step: int) -> None:
    """One more record in metrics.jsonl."""
    record = {"step": step, "reward/all/mean": step / 10, "time/step": 1.0, "weights/lag_s": 0.05}
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


def _write_span(
    path: Path, program: str, name: str, start_s: float, seconds: float, attributes: list[dict[str, Any]]
) -> None:
    span = {
        "name": name, "traceId": "a" * 32, "spanId": name, "parentSpanId": "", "attributes": attributes,
        "startTimeUnixNano": str(round(start_s * 1e9)), "endTimeUnixNano": str(round((start_s + seconds) * 1e9)),
    }  # fmt: skip
    (path / "traces").mkdir(exist_ok=True)
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    (path / "traces" / f"{program}.jsonl").write_text(f"{line}\n")
