"""The file of results: a line for each rollout, which is then never played again."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from meshrl.core.config import ConfigError
from meshrl.trials.plan import TrialKey
from meshrl.wire.growing_file import whole_size
from meshrl.wire.values import JsonObject

ROLLOUTS_OF_EPISODE = "rollouts_of_episode"
"""Lines of the episode: one for each of its agents that train."""


class RowFile:
    """JSON lines at `path`, appended to by one process at a time. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Cuts off half a line. Raises ConfigError when the file cannot be written, or another process has it."""
        with ExitStack() as opening:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                opening.callback(os.close, self._descriptor)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(self._descriptor, whole_size(self.path))
            except BlockingIOError as error:
                raise ConfigError(
                    f"output_dir: {self.path} is written by another process; wait for its end, or choose another"
                    " output_dir"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"output_dir: {str(self.path)!r} cannot be written: {error.strerror}; choose another output_dir"
                ) from error
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._open:
            os.fsync(self._descriptor)

    def append(self, rows: Sequence[JsonObject]) -> None:
        """Writes the lines of one episode at once."""
        left = memoryview("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        while left:
            left = left[os.write(self._descriptor, left) :]

    def __iter__(self) -> Iterator[JsonObject]:
        """Raises ConfigError for a line that is none of ours."""
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("no object")
                except ValueError as error:
                    raise ConfigError(
                        f"output_dir: line {number} of {self.path} is no result ({error}); delete it, or choose another"
                        " output_dir"
                    ) from error
                yield row


def key_of(row: JsonObject) -> TrialKey:
    return (row["checkpoint"], row["environment"], row["task"], row["number"])


def whole_episodes(rows: Sequence[JsonObject]) -> set[TrialKey]:
    lines = Counter(key_of(row) for row in rows)
    return {key for row in rows if lines[key := key_of(row)] >= row[ROLLOUTS_OF_EPISODE]}
