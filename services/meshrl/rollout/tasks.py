"""The tasks of one taskset by index, finite or not; asked once a group.

A finite taskset is held as a list. Of an infinite one the latest tasks are held; an older index reads it from the
start again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from pydantic import ValidationError
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset

from meshrl.wire.errors import FieldViolation, MeshError, Reason

KEPT_TASKS = 4096
FURTHEST_SKIP = 100_000


class TaskSource:
    """Tasks of `taskset`. `load` blocks: call it off the event loop."""

    def __init__(self, taskset: Taskset, name: str) -> None:
        self._taskset = taskset
        self._name = name
        self._finite: list[Task] | None = None
        self._window: deque[Task] = deque(maxlen=KEPT_TASKS)
        self._next = 0
        self._iterator: Iterator[Task] | None = None
        self._lock = asyncio.Lock()

    def load(self) -> None:
        """Reads a finite taskset whole."""
        if self._taskset.bounded:
            self._finite = list(self._taskset)

    @property
    def num_tasks(self) -> int | None:
        """None when the taskset is infinite."""
        return None if self._finite is None else len(self._finite)

    async def at(self, index: int) -> Task:
        """The task at `index`. Raises MeshError UNKNOWN_TASK when there is none."""
        if self._finite is not None:
            if index >= len(self._finite):
                raise MeshError(
                    Reason.UNKNOWN_TASK, f"{self._name} has {len(self._finite)} tasks, there is no task {index}"
                )
            return self._finite[index]
        async with self._lock:
            start = self._next - len(self._window)
            if start <= index < self._next:
                return self._window[index - start]
            return await asyncio.to_thread(self._read_to, index)

    def of_payload(self, payload: str) -> Task:
        """A task of the caller's own, from the JSON of the taskset's data. Raises MeshError INVALID_REQUEST."""
        task_cls = type(self._taskset).task_type()
        try:
            data = task_cls.data_type().model_validate_json(payload)
        except ValidationError as error:
            violations = tuple(
                FieldViolation(".".join(["task_payload", *(str(part) for part in item["loc"])]), item["msg"])
                for item in error.errors()
            )
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"task_payload is not a task of {self._name} ({task_cls.data_type().__name__})",
                violations=violations,
            ) from error
        return task_cls(data, self._taskset.config.task)

    def _read_to(self, index: int) -> Task:
        if index < self._next or self._iterator is None:
            self._iterator, self._next = iter(self._taskset), 0
            self._window.clear()
        if index - self._next > FURTHEST_SKIP:
            raise MeshError(
                Reason.UNKNOWN_TASK,
                f"{self._name} stands at task {self._next}; task {index} is more than {FURTHEST_SKIP} ahead",
            )
        while self._next <= index:
            try:
                task = next(self._iterator)
            except StopIteration:
                raise MeshError(
                    Reason.UNKNOWN_TASK, f"{self._name} ended after {self._next} tasks, there is no task {index}"
                ) from None
            self._window.append(task)
            self._next += 1
        return self._window[-1]
