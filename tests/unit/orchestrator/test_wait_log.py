"""What a run waits for is said once a minute at most, by name."""

import asyncio
from collections.abc import Iterator

import pytest
from loguru import logger

from meshrl.core.clock import Clock
from meshrl.orchestrator.reports.wait_log import WaitLog


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]))
    yield lines
    logger.remove(sink)


class Minutes:
    """A clock that moves by what is slept, and lets others run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = Clock(now=lambda: self.now_s, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    async def reach(self, end_s: float) -> None:
        while self.now_s < end_s:  # noqa: ASYNC110  # the time is a plain number that another task moves
            await asyncio.sleep(0)


async def test_a_wait_is_said_after_a_minute_and_every_minute_and_not_once_it_is_over(said: list[str]) -> None:
    minutes = Minutes()
    waits = WaitLog(minutes.clock)
    saying = asyncio.create_task(waits.say())
    left = iter(range(9, 0, -1))
    with waits.waiting(lambda: f"{next(left)} groups of 'slow'"):
        await minutes.reach(200.0)
    await minutes.reach(500.0)
    saying.cancel()
    assert len(said) == 3
    assert said[0].startswith("waiting for 6")
    assert said[0].endswith(" s: 9 groups of 'slow'")
    assert said[2].endswith(" s: 7 groups of 'slow'")


async def test_waits_that_end_within_a_minute_are_not_said(said: list[str]) -> None:
    minutes = Minutes()
    waits = WaitLog(minutes.clock)
    saying = asyncio.create_task(waits.say())
    for _ in range(20):
        with waits.waiting(lambda: "never said"):
            await minutes.reach(minutes.now_s + 50.0)
    saying.cancel()
    assert said == []
