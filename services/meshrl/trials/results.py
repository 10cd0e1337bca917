"""The files of a command's folder: rollouts, failures, and their settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from meshrl.core.config import ConfigError
from meshrl.core.durable import write_file
from meshrl.sampling.groups import RolloutGroup
from meshrl.trials.plan import Trial, TrialKey, differing_settings
from meshrl.trials.rows import ROLLOUTS_OF_EPISODE, RowFile, key_of, whole_episodes
from meshrl.wire.types import Rollout
from meshrl.wire.values import JsonObject

RESULTS, FAILURES, SETTINGS = "results.jsonl", "failures.jsonl", "settings.json"
LONG_FIELDS = ("completion", "conversations")
"""Fields of a row that are in the file alone, not in memory."""


class TrialResults:
    """The results of one command in `folder`, over restarts. A context manager. A folder with results of other
    `settings` is refused. `clean` deletes earlier results, and the files that `derived` names."""

    def __init__(self, folder: Path, settings: JsonObject, *, clean: bool = False, derived: Sequence[str] = ()) -> None:
        self.rows: list[JsonObject] = []
        """Without their long fields, in the order of their ends."""
        self.done: set[TrialKey] = set()
        self.folder = folder
        self._settings = settings
        self._clean = clean
        self._derived = derived
        self.stored = RowFile(folder / RESULTS)
        self._failures = RowFile(folder / FAILURES)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError for a folder that cannot be used."""
        with ExitStack() as opening:
            opening.enter_context(self.stored)
            opening.enter_context(self._failures)
            if self._clean:
                for name in (RESULTS, FAILURES):
                    (self.folder / name).write_bytes(b"")  # the locked file itself
                for name in (SETTINGS, *self._derived):
                    (self.folder / name).unlink(missing_ok=True)
            self._check_settings()
            rows = [_short(row) for row in self.stored]
            self.done = whole_episodes(rows)
            self.rows = [row for row in rows if key_of(row) in self.done]
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def record(self, checkpoint: str, trial: Trial, group: RolloutGroup) -> list[JsonObject]:
        """Writes the outcome of a trial. Returns its rows, none for a failure."""
        rows = [_row(checkpoint, trial, rollout, len(group.rollouts)) for rollout in group.rollouts]
        if not rows:
            place = {"checkpoint": checkpoint, "environment": trial.environment, "task": trial.task}
            self._failures.append([{**place, "number": trial.number, "error": why_failed(group)}])
            return []
        self.stored.append(rows)
        self.done.add(trial.key(checkpoint))
        self.rows += [_short(row) for row in rows]
        return rows

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS
        try:
            kept = json.loads(path.read_text()) if path.exists() else None
        except ValueError:  # half written, before the first result
            kept = None
        if kept is None or not isinstance(kept, dict):
            write_file(path, json.dumps(self._settings, indent=2) + "\n")
            return
        if problems := differing_settings(kept, self._settings):
            raise ConfigError(
                f"output_dir: {self.folder} holds results of other settings ({'; '.join(problems)}); choose another"
                " output_dir, or have them deleted (--clean-output-dir)"
            )
        environments = {**kept.get("env", {}), **self._settings.get("env", {})}
        write_file(path, json.dumps({**self._settings, "env": environments}, indent=2) + "\n")


def why_failed(group: RolloutGroup) -> str:
    if group.failures:
        return f"{group.failures[-1].reason}: {group.failures[-1].message}"
    return group.cut_short or "the rollout was cancelled"


def _row(checkpoint: str, trial: Trial, rollout: Rollout, rollouts_of_episode: int) -> JsonObject:
    said = [json.loads(conversation) for conversation in rollout.conversations]
    return {
        "rollout_id": rollout.rollout_id,
        "checkpoint": checkpoint,
        "version": rollout.oldest_version,
        "environment": trial.environment,
        "task": trial.task,
        "task_key": rollout.task_key,
        "number": trial.number,
        "seed": trial.seed,
        "agent": rollout.agent,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "metrics": dict(rollout.metrics),
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "num_turns": rollout.num_turns,
        "num_tokens": rollout.num_tokens,
        "timings_s": dict(rollout.timings_s),
        ROLLOUTS_OF_EPISODE: rollouts_of_episode,
        "completion": rollout.completion,
        **({"conversations": said} if said else {}),
    }


def _short(row: JsonObject) -> JsonObject:
    return {name: value for name, value in row.items() if name not in LONG_FIELDS}
