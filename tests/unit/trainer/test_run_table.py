"""The queue between the event loop and the training thread: what it holds back, and until when."""

import asyncio

import pytest

from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Batch

BATCH = Batch(run_id="main", step=1, micro_batches=(), loss_tokens=1, environments=("env",))


async def test_a_held_desk_takes_batches_and_hands_them_out_once_it_is_opened() -> None:
    table = RunTable(StepBook(run_id="main", epoch=1), held=True)
    table.own.submit(BATCH, "a")
    work = table.take({"main"}, wait=True)
    await asyncio.sleep(0.05)
    assert not work.done()
    table.own.open()
    taken = await asyncio.wait_for(asyncio.wrap_future(work), 60.0)
    assert taken is not None
    assert taken.work == {"main": BATCH}


async def test_work_is_given_to_idle_runs_alone_and_calls_come_at_once() -> None:
    table = RunTable(StepBook(run_id="main", epoch=1))
    table.put(TrainingQueue(StepBook(run_id="second", epoch=1), table.changed))
    for queue in table:
        queue.submit(BATCH, "a")
    called = asyncio.create_task(table.call(lambda: 7))
    await asyncio.sleep(0)
    taken = await asyncio.wait_for(asyncio.wrap_future(table.take({"second"}, wait=False)), 60.0)
    assert taken is not None
    assert list(taken.work) == ["second"]
    (call,) = taken.calls
    call()
    assert await called == 7
    late = asyncio.create_task(table.call(lambda: 8))
    await asyncio.sleep(0)
    table.close()
    assert await asyncio.wrap_future(table.take({"main"}, wait=True)) is None
    with pytest.raises(MeshError, match="the trainer ends"):
        await late


async def test_a_held_desk_that_closes_ends_the_training_thread() -> None:
    table = RunTable(StepBook(run_id="main", epoch=1), held=True)
    table.own.submit(BATCH, "a")
    work = table.take({"main"}, wait=True)
    table.own.close()
    assert await asyncio.wait_for(asyncio.wrap_future(work), 60.0) is None
