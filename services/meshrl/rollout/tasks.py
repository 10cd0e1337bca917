"""The tasks of one taskset by index, finite or not.

An infinite taskset is a generator, which verifiers can only draw in order: a run that resumes draws again up to where
it stood, once, in a thread that goes on when a request gives up. A taskset with a method `task_at(index)` makes any
task at once; with `num_tasks` too it is finite and never read whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from loguru import logger
from pydantic import ValidationError
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset

from meshrl.rollout.player import refuse_unknown
from meshrl.wire.errors import FieldViolation, MeshError, Reason

MADE_TASKS = 256
"""The latest made tasks: the rollouts of a group may be asked for one by one, and share one."""
KEPT_TASKS = 4096
"""Of an infinite taskset: so many of the first, for evaluations, and of the latest."""
CHUNK_S = 0.25
PROGRESS_EVERY_S = 10.0


class TaskSource:
    """`load` blocks: call it off the event loop."""

    def __init__(self, taskset: Taskset, name: str) -> None:
        self._taskset = taskset
        self._name = name
        self._finite: list[Task] | None = None
        self._task_at: Callable[[int], Task] | None = getattr(taskset, "task_at", None)
        self._num_tasks: int | None = getattr(taskset, "num_tasks", None) if self._task_at is not None else None
        self._made: dict[int, asyncio.Task[Task]] = {}
        self._drawn = _Draws(taskset)
        self._waiting: dict[asyncio.Future[Task], int] = {}
        self._reader: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Reads a finite taskset whole, or makes the first task; raises what the taskset raises."""
        if self._task_at is not None and (self._num_tasks is not None or not self._taskset.bounded):
            if self._num_tasks != 0:
                self._task_at(0)
        elif self._taskset.bounded:
            self._finite = list(self._taskset)

    @property
    def num_tasks(self) -> int | None:
        """None when the taskset is infinite."""
        return self._num_tasks if self._finite is None else len(self._finite)

    async def at(self, index: int) -> Task:
        """Raises MeshError UNKNOWN_TASK, or ENVIRONMENT_FAILED when the taskset breaks. An infinite taskset may have to
        draw all tasks before; cancel it to give up."""
        refuse_unknown(self._name, self.num_tasks, index)
        if self._finite is not None:
            return self._finite[index]
        if self._task_at is not None:
            made = self._made.get(index)
            if made is None:
                make = self._task_at
                work = asyncio.to_thread(lambda: _finished(self._taskset, make(index), index))
                made = self._made[index] = asyncio.create_task(work)
                if len(self._made) > MADE_TASKS:
                    del self._made[next(iter(self._made))]
            try:
                return await asyncio.shield(made)
            except Exception as error:  # the taskset's own code; the group fails, with the reason
                self._made.pop(index, None)
                raise self._broken(index, error) from error
        if (task := self._drawn.kept(index)) is not None:
            return task
        found: asyncio.Future[Task] = asyncio.get_running_loop().create_future()
        self._waiting[found] = index
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            return await found
        finally:
            self._waiting.pop(found, None)

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

    async def _read(self) -> None:
        began = said = time.monotonic()
        while self._waiting:
            target = min(self._waiting.values())
            try:
                await asyncio.to_thread(self._drawn.read_towards, target, CHUNK_S)
            except Exception as error:  # noqa: BLE001  # the taskset's own code: whoever waits hears it
                self._answer(self._broken(self._drawn.position, error))
                self._drawn = _Draws(self._taskset)
                return
            self._answer()
            if self._waiting and time.monotonic() - said >= PROGRESS_EVERY_S:
                said = time.monotonic()
                drawn = self._drawn.position
                logger.info("{}: drawing up to task {}, {} drawn in {:.0f} s", self._name, target, drawn, said - began)

    def _answer(self, error: MeshError | None = None) -> None:
        for found, index in list(self._waiting.items()):
            task = self._drawn.kept(index)
            ended = self._drawn.ended_after
            if found.done():
                continue
            if error is not None:
                found.set_exception(error)
            elif task is not None:
                found.set_result(task)
            elif ended is not None and index >= ended:
                message = f"{self._name} ended after {ended} tasks, there is no task {index}"
                found.set_exception(MeshError(Reason.UNKNOWN_TASK, message))
            else:
                continue
            del self._waiting[found]

    def _broken(self, index: int, error: Exception) -> MeshError:
        return MeshError(
            Reason.ENVIRONMENT_FAILED, f"{self._name}: task {index} cannot be made: {type(error).__name__}: {error}"
        )


class _Draws:
    """An infinite taskset drawn from its start. Not safe between threads, but `kept` may be asked while another one
    draws."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        # A view, or an order of the taskset's own, yields finished tasks; else only those asked for are finished.
        self._plain = taskset.transform is None and type(taskset).__iter__ is Taskset.__iter__
        self._head: list[Task] = []
        self._latest: deque[tuple[int, Task]] = deque(maxlen=KEPT_TASKS)
        self._tasks: Iterator[Task] | None = None
        self.position = 0
        self.ended_after: int | None = None

    def kept(self, index: int) -> Task | None:
        if index < len(self._head):
            return self._finish(self._head[index], index)
        try:
            first = self._latest[0][0]
            number, task = self._latest[index - first] if index >= first else (-1, None)
        except IndexError:  # none held, or not yet drawn
            return None
        return self._finish(task, index) if number == index else None

    def read_towards(self, index: int, for_s: float) -> None:
        """Draws for at most `for_s` seconds; from the start again for a task that is no longer kept."""
        if self._tasks is None or index < self.position:
            self._tasks = iter(self._taskset.load() if self._plain else self._taskset)
            self.position = 0
            self.ended_after = None
            self._latest.clear()
        until = time.monotonic() + for_s
        while self.position <= index and self.ended_after is None and time.monotonic() < until:
            task = next(self._tasks, None)
            if task is None:
                self.ended_after = self.position
                return
            if self.position < KEPT_TASKS and self.position == len(self._head):
                self._head.append(task)
            self._latest.append((self.position, task))
            self.position += 1

    def _finish(self, task: Task, index: int) -> Task:
        return _finished(self._taskset, task, index) if self._plain else task


def _finished(taskset: Taskset, task: Task, index: int) -> Task:
    prompt = {} if taskset.system_prompt is None else {"system_prompt": taskset.system_prompt}
    return task.with_data(idx=index, **prompt)
