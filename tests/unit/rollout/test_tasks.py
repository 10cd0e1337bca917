"""Tasks by index, from finite and infinite tasksets."""

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
    assert (await tasks.at(9)).data.number == 9
    assert taskset.reads == KEPT_TASKS + 20
    assert (await tasks.at(11)).data.idx == 11


async def test_a_leap_far_ahead_in_an_infinite_taskset_is_refused():
    _, tasks = source(Numbers)
    with pytest.raises(MeshError) as caught:
        await tasks.at(10**12)
    assert caught.value.reason is Reason.UNKNOWN_TASK


def test_a_payload_becomes_a_task_and_a_bad_one_names_its_fields():
    _, tasks = source(ThreeNumbers)
    assert tasks.of_payload('{"number": 8}').data.number == 8
    with pytest.raises(MeshError) as caught:
        tasks.of_payload('{"number": "x"}')
    assert [violation.field for violation in caught.value.violations] == ["task_payload.number"]
    with pytest.raises(MeshError) as caught:
        tasks.of_payload("not json")
    assert caught.value.reason is Reason.INVALID_REQUEST
