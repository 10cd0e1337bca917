"""Tasks by index, from finite and infinite tasksets."""

import asyncio

import pytest
import verifiers.v1 as vf

from meshrl.rollout.tasks import KEPT_TASKS, TaskSource
from meshrl.wire.errors import MeshError, Reason


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    pass


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    INFINITE = True
    reads = 0

    def load(self):
        number = 0
        while self.INFINITE or number < 3:
            self.reads += 1
            yield NumberTask(NumberData(number=number, prompt=str(number)), self.config.task)
            number += 1


class ThreeNumbers(Numbers):
    INFINITE = False


def source(cls: type[Numbers]) -> tuple[Numbers, TaskSource]:
    taskset = cls(vf.TasksetConfig(id="numbers"))
    tasks = TaskSource(taskset, "numbers")
    tasks.load()
    return taskset, tasks


async def test_a_finite_taskset_is_read_once_and_knows_its_end():
    taskset, tasks = source(ThreeNumbers)
    assert tasks.num_tasks == 3
    assert [(await tasks.at(index)).data.number for index in (2, 0, 2)] == [2, 0, 2]
    assert taskset.reads == 3
    with pytest.raises(MeshError) as caught:
        await tasks.at(3)
    assert caught.value.reason is Reason.UNKNOWN_TASK


async def test_an_infinite_taskset_is_read_as_far_as_asked_and_again_for_what_it_forgot():
    taskset, tasks = source(Numbers)
    assert tasks.num_tasks is None
    assert (await tasks.at(KEPT_TASKS + 9)).data.number == KEPT_TASKS + 9
    assert (await tasks.at(10)).data.number == 10
    assert taskset.reads == KEPT_TASKS + 10
    assert (await tasks.at(3 * KEPT_TASKS)).data.idx == 3 * KEPT_TASKS
    assert (await tasks.at(9)).data.number == 9  # the first ones are kept
    assert taskset.reads == 3 * KEPT_TASKS + 1
    assert (await tasks.at(KEPT_TASKS)).data.number == KEPT_TASKS
    assert taskset.reads == 4 * KEPT_TASKS + 2


async def test_a_run_resumes_behind_a_hundred_thousand_draws_and_more():
    taskset, tasks = source(Numbers)
    assert (await tasks.at(150_000)).data.number == 150_000
    assert (await tasks.at(149_999)).data.idx == 149_999
    assert (await tasks.at(0)).data.number == 0
    assert taskset.reads == 150_001


async def test_who_gives_up_waiting_for_a_far_task_has_brought_the_next_one_closer():
    taskset, tasks = source(Numbers)
    waiting = asyncio.create_task(tasks.at(10**12))
    async with asyncio.timeout(60.0):
        while not taskset.reads:  # noqa: ASYNC110  # a plain number
            await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert tasks._reader is not None
    await asyncio.wait_for(tasks._reader, 60.0)  # nobody waits, so it stops
    drawn = taskset.reads
    assert drawn > 0
    assert (await tasks.at(drawn + 100)).data.number == drawn + 100
    assert taskset.reads == drawn + 101


class Direct(Numbers):
    def task_at(self, index: int) -> NumberTask:
        if index == 13:
            raise ValueError("thirteen is left out")
        return NumberTask(NumberData(number=index, prompt=str(index)), self.config.task)


async def test_a_taskset_that_makes_any_task_at_once_is_not_drawn_through():
    taskset, tasks = source(Direct)
    task = await tasks.at(10**12)
    assert (task.data.number, task.data.idx) == (10**12, 10**12)
    assert taskset.reads == 0
    with pytest.raises(MeshError, match="numbers: task 13 cannot be made: ValueError: thirteen") as caught:
        await tasks.at(13)
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED


class Counted(Direct):
    INFINITE = False
    num_tasks = 10**9


async def test_a_finite_taskset_that_makes_any_task_at_once_is_not_read_to_count_its_tasks():
    taskset, tasks = source(Counted)
    assert tasks.num_tasks == 10**9
    assert (await tasks.at(10**9 - 1)).data.number == 10**9 - 1
    assert taskset.reads == 0
    with pytest.raises(MeshError, match="numbers has 1000000000 tasks, there is no task 1000000000") as caught:
        await tasks.at(10**9)
    assert caught.value.reason is Reason.UNKNOWN_TASK


class Breaking(Numbers):
    def load(self):
        for number, task in enumerate(super().load()):
            if number == 5 and self.reads < 10:
                raise ValueError("no more numbers")
            if number == 7:
                return
            yield task


async def test_a_taskset_that_breaks_or_ends_says_so_and_is_drawn_anew():
    _, tasks = source(Breaking)
    with pytest.raises(MeshError, match="numbers: task 5 cannot be made: ValueError: no more numbers") as caught:
        await tasks.at(6)
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED
    assert (await tasks.at(6)).data.number == 6
    with pytest.raises(MeshError, match="numbers ended after 7 tasks, there is no task 9") as caught:
        await tasks.at(9)
    assert caught.value.reason is Reason.UNKNOWN_TASK
    assert (await tasks.at(1)).data.number == 1


def test_a_payload_becomes_a_task_and_a_bad_one_names_its_fields():
    _, tasks = source(ThreeNumbers)
    assert tasks.of_payload('{"number": 8}').data.number == 8
    with pytest.raises(MeshError) as caught:
        tasks.of_payload('{"number": "x"}')
    assert [violation.field for violation in caught.value.violations] == ["task_payload.number"]
    with pytest.raises(MeshError) as caught:
        tasks.of_payload("not json")
    assert caught.value.reason is Reason.INVALID_REQUEST
