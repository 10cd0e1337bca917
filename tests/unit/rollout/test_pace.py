"""Rollouts take turns on the event loop."""

import asyncio

from meshrl.core.waiting import Pace


async def test_one_goes_on_in_each_round_of_the_loop():
    pace, went, rounds = Pace(), [], 0

    async def work(number: int) -> None:
        await pace.turn()
        went.append((number, rounds))

    workers = [asyncio.create_task(work(number)) for number in range(20)]
    while len(went) < 20:
        await asyncio.sleep(0)
        rounds += 1
        assert rounds < 1000
    assert [number for number, _ in went] == list(range(20))
    assert len({at for _, at in went}) == 20
    await asyncio.gather(*workers)


async def test_one_that_is_cancelled_holds_nobody_up():
    pace, went = Pace(), []

    async def work(number: int) -> None:
        await pace.turn()
        went.append(number)

    workers = [asyncio.create_task(work(number)) for number in range(5)]
    await asyncio.sleep(0)
    for number in (0, 1, 3):
        workers[number].cancel()
    async with asyncio.timeout(60.0):
        await asyncio.gather(*workers, return_exceptions=True)
        await pace.turn()
    assert went == [2, 4]
