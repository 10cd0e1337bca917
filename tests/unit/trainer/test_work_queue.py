"""The queue between the event loop and the training thread: what it holds back, and until when."""

import asyncio

from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.work_queue import TrainingQueue
from meshrl.wire.types import Batch

BATCH = Batch(run_id="main", step=1, micro_batches=(), loss_tokens=1, environments=("env",))


async def test_a_held_desk_takes_batches_and_hands_them_out_once_it_is_opened() -> None:
    queue = TrainingQueue(StepBook(run_id="main", epoch=1), held=True)
    queue.submit(BATCH, "a")
    work = queue.take()
    await asyncio.sleep(0.05)
    assert not work.done()
    queue.open()
    assert await asyncio.wait_for(asyncio.wrap_future(work), 60.0) is BATCH


async def test_a_held_desk_that_closes_ends_the_training_thread() -> None:
    queue = TrainingQueue(StepBook(run_id="main", epoch=1), held=True)
    queue.submit(BATCH, "a")
    work = queue.take()
    queue.close()
    assert await asyncio.wait_for(asyncio.wrap_future(work), 60.0) is None
