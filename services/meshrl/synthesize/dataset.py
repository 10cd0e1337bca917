"""The dataset that `synthesize` writes: one row for each conversation kept, in the columns that `sft` reads.

A row has `messages` and maybe `tools` (JSON), in the form of OpenAI's chat API, and columns of its origin. A rollout
whose id is there is not added again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from loguru import logger

from meshrl.trials.rows import RowFile
from meshrl.wire.values import JsonObject

REASONING = "reasoning_content"


class ConversationDataset:
    """A file that is appended to. A context manager. The keys are those of `SynthesisConfig`."""

    def __init__(
        self, path: Path, *, model: str, min_reward: float | None, keep_truncated: bool, reasoning_field: str | None
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """This command's rollouts that are not kept, by reason."""
        self.kept = 0
        self.path = path
        self._file = RowFile(path)
        self._model = model
        self._min_reward = min_reward
        self._keep_truncated = keep_truncated
        self._reasoning_field = reasoning_field
        self._there: set[str] = set()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError when the file cannot be used."""
        with ExitStack() as opening:
            opening.enter_context(self._file)
            self._there = {row["rollout_id"] for row in self._file if "rollout_id" in row}
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def take(self, rows: Iterable[JsonObject]) -> None:
        """Appends rollouts that are to be kept and new. Raises OSError."""
        for row in rows:
            if (why := self._why_dropped(row)) is not None:
                self.dropped[why] += 1
                continue
            self.kept += 1
            if row["rollout_id"] not in self._there:
                self._file.append([self._row(row, said) for said in row["conversations"]])
                self._there.add(row["rollout_id"])

    def write_parquet(self) -> Path | None:
        """Writes all rows of the file beside it; None without pyarrow, or where rows do not fit one table. Blocks.
        Raises OSError."""
        try:
            import pyarrow as pa  # comes with datasets, an extra
            import pyarrow.parquet as pq
        except ImportError:
            logger.info("no parquet file is written without pyarrow, which comes with the datasets package")
            return None
        path = self.path.with_suffix(".parquet")
        rows = list(self._file)
        if not rows:
            return None
        unfinished = path.with_name(path.name + ".tmp")
        # a table needs rows of one set of columns: of rows that others wrote, those that ours have
        columns = ("messages", "tools", "reward", "environment", "task", "task_key", "agent", "rollout_id", "model")
        try:
            table = pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
        except pa.ArrowException as error:  # such as contents that are text here and a list of parts there
            logger.warning("no parquet file: the rows differ in their types ({}); {} has them", error, self.path)
            return None
        pq.write_table(table, unfinished)
        unfinished.replace(path)
        return path

    def _why_dropped(self, row: JsonObject) -> str | None:
        if self._min_reward is not None and row["reward"] < self._min_reward:
            return "reward"
        if row["truncated"] and not self._keep_truncated:
            return "truncated"
        return None if row.get("conversations") else "empty"

    def _row(self, row: JsonObject, said: JsonObject) -> dict[str, object]:
        fields: dict[str, object] = {"messages": [self._message(message) for message in said["messages"]]}
        if said.get("tools"):
            fields["tools"] = json.dumps(said["tools"], ensure_ascii=False)
        from_row = ("reward", "environment", "task", "task_key", "agent", "rollout_id")
        return {**fields, **{name: row[name] for name in from_row}, "model": self._model}

    def _message(self, message: JsonObject) -> dict[str, object]:
        fields = {name: value for name, value in message.items() if name != REASONING}
        reasoning = message.get(REASONING)
        field = self._reasoning_field
        if not reasoning or field is None:
            return fields
        if field == "content":
            return {**fields, "content": f"<think>\n{reasoning}\n</think>\n\n{fields.get('content') or ''}"}
        return {**fields, field: reasoning}
