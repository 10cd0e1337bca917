"""The queue between the event loop and the training thread: what it holds back, and until when."""

import asyncio

from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.table import RunTable
from meshrl.wire.types import Batch

BATCH = Batch(run_id="main", step=1, micro_batches=(), loss_tokens=1, environments=("env",))


async def test_a_held_desk_takes_batches_and_hands_them_out_once_it_is_opened() -> None:
    table = RunTable(StepBook(run_id="main", epoch=1), held=True)
    table.own.submit(BATCH, "a")
    work = table.take()
    await asyncio.sleep(0.05)
    assert not work.done()
    table.own.open()
    assert await asyncio.wait_for(asyncio.wrap_future(work), 60.0) == ("main", BATCH)


async def test_a_held_desk_that_closes_ends_the_training_thread() -> None:
    table = RunTable(StepBook(run_id="main", epoch=1), held=True)
    table.own.submit(BATCH, "a")
    work = table.take()
    table.own.close()
    assert await asyncio.wait_for(asyncio.wrap_future(work), 60.0) is None
