"""Falling asleep and waking up take turns, come to their end, and are not tried again once one has failed."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.inference.sleep import Sleeper
from meshrl.wire.errors import MeshError, Reason


class Bed:
    """Both ways, noted as they begin and end; `hold` keeps them from ending."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        self.notes: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.work = 0
        self.sleeper = Sleeper(self.down, self.up, busy=lambda: self.work > 0, deadline_s=deadline_s)

    def hold(self) -> None:
        self.go_on.clear()

    async def down(self) -> None:
        await self.note("down")

    async def up(self) -> None:
        await self.note("up")

    async def note(self, way: str) -> None:
        self.notes.append(f"{way} begins")
        await self.go_on.wait()
        self.notes.append(f"{way} ends")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_way_is_gone_once_however_often_it_is_asked_for() -> None:
    bed = Bed()
    assert await asyncio.gather(bed.sleeper.sleep(), bed.sleeper.sleep()) == [True, True]
    assert bed.sleeper.sleeping
    await asyncio.gather(*(bed.sleeper.wake() for _ in range(3)))
    await bed.sleeper.wake()
    assert bed.notes == ["down begins", "down ends", "up begins", "up ends"]
    assert not bed.sleeper.sleeping


async def test_whoever_comes_while_it_falls_asleep_waits_for_that_and_wakes_it() -> None:
    bed = Bed()
    bed.hold()
    sleeping = asyncio.create_task(bed.sleeper.sleep())
    await settle()
    waking = asyncio.create_task(bed.sleeper.wake())
    await settle()
    assert bed.notes == ["down begins"]
    bed.go_on.set()
    assert await sleeping
    await waking
    assert bed.notes == ["down begins", "down ends", "up begins", "up ends"]


async def test_work_that_comes_first_keeps_it_awake() -> None:
    bed = Bed()
    bed.work = 1
    assert not await bed.sleeper.sleep()
    assert bed.notes == []


async def test_waiter_that_gives_up_does_not_stop_it_halfway() -> None:
    bed = Bed()
    await bed.sleeper.sleep()
    bed.hold()
    waiter = asyncio.create_task(bed.sleeper.wake())
    await settle()
    waiter.cancel()
    await asyncio.wait({waiter})
    bed.go_on.set()
    await bed.sleeper.wake()
    assert bed.notes == ["down begins", "down ends", "up begins", "up ends"]


@pytest.mark.parametrize("way", ["down", "up"])
async def test_way_without_an_end_ends_at_its_deadline_for_good(way: str) -> None:
    bed = Bed(deadline_s=0.05)
    if way == "up":
        await bed.sleeper.sleep()
    bed.hold()
    with pytest.raises(MeshError, match=r"took longer than 0.05 s; .* start the engine anew") as failure:
        await (bed.sleeper.sleep() if way == "down" else bed.sleeper.wake())
    assert failure.value.reason is Reason.ENGINE_FAILED
    bed.go_on.set()
    for again in (bed.sleeper.sleep, bed.sleeper.wake):
        with pytest.raises(MeshError, match="took longer"):
            await again()
    assert bed.notes[-1] == f"{way} begins"
