"""What the loop waits for at the trainer, when a batch is withdrawn that was to come next."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from meshrl.client import TrainerClient
from meshrl.core.clock import Clock
from meshrl.core.waiting import Pulse
from meshrl.orchestrator.config import DeadlinesConfig
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.orchestrator.run import StepCursors
from meshrl.sampling.retry import RunError
from meshrl.wire.types import RunInfo

STEP_S = 0.3


@dataclass
class RunWithoutBatches:
    """A run of which nothing is uploaded."""

    info: RunInfo = field(default_factory=lambda: RunInfo(run_id="main", step=0, version=0, epoch=1, revision=0))
    steps: StepCursors = field(default_factory=lambda: StepCursors(recorded=0, uploaded=0, trained=0))

    changed: Pulse = field(default_factory=Pulse)
    clock: Clock = field(default_factory=Clock)
    journal: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(durable=pytest.fail))


@pytest.fixture
async def uploader() -> AsyncIterator[BatchUploader]:
    """One for a trainer that nobody asks anything."""
    async with TrainerClient("127.0.0.1:1") as client:
        yield BatchUploader(client, RunWithoutBatches(), deadlines=DeadlinesConfig(step_s=STEP_S))


async def test_the_time_of_a_step_begins_with_the_batch_that_takes_the_place_of_a_withdrawn_one(uploader) -> None:
    uploader.add(1)
    waiting = asyncio.create_task(uploader.next())
    await asyncio.sleep(0.0)
    uploader.withdraw(1)
    await asyncio.sleep(3 * STEP_S)  # as long as its groups take
    assert not waiting.done(), waiting.exception()
    uploader.add(1)
    with pytest.raises(RunError, match=r"did not finish step 1 within 0\.3 s"):
        await asyncio.wait_for(waiting, 60.0)


async def test_a_withdrawn_batch_is_not_waited_for_at_the_end(uploader) -> None:
    uploader.add(1)
    uploader.add(2)
    waiting = asyncio.create_task(uploader.next())
    await asyncio.sleep(0.0)
    uploader.withdraw(1)
    uploader.end()
    assert await asyncio.wait_for(waiting, 60.0) is None
