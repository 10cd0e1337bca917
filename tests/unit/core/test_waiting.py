"""Waiting for a stop or for work, for a change, and until nothing is in flight."""

import asyncio

import pytest

from meshrl.core.waiting import (
    InFlight,
    Pulse,
    StoppedError,
    beside,
    first_of,
    next_within,
    set_within,
    stop_or_first,
    unless_stopped,
)


async def test_work_that_fails_raises_what_it_raised():
    async def work():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless_stopped(asyncio.Event(), work())


async def test_a_stop_cancels_the_work_and_waits_for_its_clean_up():
    stop, cleaned = asyncio.Event(), []

    async def work():
        stop.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(StoppedError):
        await unless_stopped(stop, work())
    assert cleaned == [True]


async def test_work_of_a_caller_that_is_cancelled_is_cancelled():
    started, cleaned = asyncio.Event(), []

    async def work():
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    caller = asyncio.create_task(unless_stopped(asyncio.Event(), work()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cleaned == [True]


async def test_work_that_is_done_wins_over_a_stop_that_came_as_well():
    stop, work = asyncio.Event(), asyncio.get_running_loop().create_future()
    stop.set()
    work.set_result(7)
    assert await unless_stopped(stop, work) == 7


async def test_a_stop_or_the_first_end_leaves_the_others_as_they_are():
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    done, pending = loop.create_future(), loop.create_future()
    done.set_exception(ValueError("not raised here"))
    await stop_or_first(stop, done, pending)
    assert not pending.done()
    assert done.exception() is not None
    stop.set()
    await stop_or_first(stop, pending)
    assert not pending.done()


async def test_the_first_of_several_coroutines_ends_the_others():
    cleaned = []

    async def fails():
        raise ValueError("kept for the caller")

    async def lasts():
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    first, second = await first_of(fails(), lasts())
    assert isinstance(first.exception(), ValueError)
    assert second.cancelled()
    assert cleaned == [True]


async def test_work_beside_a_block_ends_with_it_and_is_waited_for():
    told = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    async def broken() -> None:
        raise ValueError("it ends nothing")

    async with beside(work(), broken()):
        await asyncio.sleep(0)
        assert told == []
    assert told == ["cleaned up"]


async def test_an_event_is_waited_for_until_a_deadline():
    event = asyncio.Event()
    assert not await set_within(event, 0.01)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await set_within(event, 30.0)
    assert await set_within(event, 0.0)


async def test_a_beat_wakes_all_who_wait_and_nobody_who_comes_later():
    pulse, woken = Pulse(), []

    async def waiter(name):
        await pulse.next()
        woken.append(name)

    first, second = asyncio.create_task(waiter("first")), asyncio.create_task(waiter("second"))
    await asyncio.sleep(0)
    pulse.beat()
    await asyncio.gather(first, second)
    late = asyncio.create_task(waiter("late"))
    await asyncio.sleep(0.01)
    assert sorted(woken) == ["first", "second"]
    late.cancel()


async def test_a_beat_during_a_look_is_not_missed():
    pulse = Pulse()
    upcoming = pulse.upcoming
    pulse.beat()
    await asyncio.wait_for(upcoming.wait(), 60.0)


async def test_what_is_in_flight_is_counted_and_waited_for():
    flying = InFlight()
    with flying.one():
        with flying.one():
            assert flying.count == 2
        assert not await flying.idle_within(0.01)
    assert flying.count == 0
    assert await flying.idle_within(0.0)


async def test_what_came_as_the_wait_for_a_queue_ended_is_taken() -> None:
    queue: asyncio.Queue[str] = asyncio.Queue()
    queue.put_nowait("report")
    assert await next_within(queue, 0.0) == "report"
    assert await next_within(queue, 0.0) is None
