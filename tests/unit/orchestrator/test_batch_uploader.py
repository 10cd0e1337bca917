"""What the loop waits for at the trainer, when a batch is withdrawn that was to come next."""

import asyncio

import pytest
from opentelemetry import trace

from meshrl.client import TrainerClient
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.sampling.retry import RunError
from meshrl.wire.types import RunInfo

STEP_S = 0.3


@pytest.fixture
async def feed():
    """A feed of a trainer that nobody asks anything."""
    config = OrchestratorConfig.model_validate({"train": {"env": [{"id": "echo"}]}, "deadlines": {"step_s": STEP_S}})
    async with TrainerClient("127.0.0.1:1") as client:
        yield BatchUploader(
            client,
            config=config,
            run=RunInfo(run_id="main", step=0, version=0, epoch=1, revision=0),
            recorded=0,
            trained=0,
            batch_of=lambda step: pytest.fail("nothing is uploaded"),
            span_of=lambda step: trace.INVALID_SPAN,
            on_back=lambda step, done: None,
            on_durable=lambda step: None,
            on_refused=lambda: None,
            clock=asyncio.get_running_loop().time,
            sleep=asyncio.sleep,
        )


async def test_the_time_of_a_step_begins_with_the_batch_that_takes_the_place_of_a_withdrawn_one(feed) -> None:
    feed.add(1)
    waiting = asyncio.create_task(feed.next())
    await asyncio.sleep(0.0)
    feed.withdraw(1)
    await asyncio.sleep(3 * STEP_S)  # as long as its groups take
    assert not waiting.done(), waiting.exception()
    feed.add(1)
    with pytest.raises(RunError, match=r"did not finish step 1 within 0\.3 s"):
        await asyncio.wait_for(waiting, 30.0)


async def test_a_withdrawn_batch_is_not_waited_for_at_the_end(feed) -> None:
    feed.add(1)
    feed.add(2)
    waiting = asyncio.create_task(feed.next())
    await asyncio.sleep(0.0)
    feed.withdraw(1)
    feed.end()
    assert await asyncio.wait_for(waiting, 30.0) is None
