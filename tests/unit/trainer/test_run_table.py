"""The table of a trainer's runs, and their queues between the event loop and the training thread."""

import asyncio

import pytest

from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.wire.errors import MeshError, Reason
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


async def test_a_run_is_found_by_its_name_and_the_only_one_by_none() -> None:
    alone = RunTable(StepBook(run_id="main", epoch=2))
    assert alone.find("main") is alone.find("") is alone.own
    table = RunTable(StepBook(run_id="main", epoch=2, start_step=5))
    table.put(TrainingQueue(StepBook(run_id="second", epoch=1), table.changed))
    assert table.find("main") is table.own
    with pytest.raises(MeshError, match="run_id: must name one of main, second") as unclear:
        table.find("")
    assert unclear.value.reason is Reason.INVALID_REQUEST
    assert [queue.book.info().run_id for queue in table] == ["main", "second"]
    assert (table.own.book.info().version, table.own.book.info().epoch) == (5, 2)
    with pytest.raises(MeshError, match="no run 'other' here; this trainer holds 'main', 'second'") as caught:
        table.find("other")
    assert caught.value.reason is Reason.UNKNOWN_RUN


async def test_a_run_that_may_still_come_is_to_be_asked_for_again() -> None:
    table = RunTable(StepBook(run_id="main", epoch=2), complete=False)
    with pytest.raises(MeshError, match="still makes the runs of its last start; try again") as caught:
        table.find("second")
    assert caught.value.retryable
    assert table.find("main") is table.own
    table.complete = True
    with pytest.raises(MeshError, match="no run 'second' here"):
        table.find("second")
