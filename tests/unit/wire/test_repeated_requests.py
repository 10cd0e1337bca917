import asyncio

import pytest

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.repeated_requests import REMEMBERED_REQUESTS, REMEMBERED_S, FirstAnswers, SeenRequests


class Counter:
    def __init__(self, *, failures: int = 0) -> None:
        self.calls = 0
        self.failures = failures
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> int:
        self.calls += 1
        await self.gate.wait()
        if self.calls <= self.failures:
            raise MeshError(Reason.CHECKPOINT_FAILED, "disk full")
        return self.calls


async def test_repeated_request_gets_the_first_answer() -> None:
    answers, make = FirstAnswers[int](), Counter()
    assert [await answers.once("id", b"x", make) for _ in range(3)] == [1, 1, 1]
    assert await answers.once("other", b"x", make) == 2


async def test_same_id_with_another_payload_is_refused() -> None:
    answers, make = FirstAnswers[int](), Counter()
    await answers.once("id", b"x", make)
    with pytest.raises(MeshError) as caught:
        await answers.once("id", b"y", make)
    assert caught.value.reason is Reason.DUPLICATE_REQUEST


async def test_failed_request_may_be_tried_again() -> None:
    answers, make = FirstAnswers[int](), Counter(failures=1)
    with pytest.raises(MeshError, match="disk full"):
        await answers.once("id", b"x", make)
    assert await answers.once("id", b"x", make) == 2


async def test_caller_that_hangs_up_does_not_cancel_the_work() -> None:
    answers, make = FirstAnswers[int](), Counter()
    make.gate.clear()
    first = asyncio.create_task(answers.once("id", b"x", make))
    await asyncio.sleep(0)
    first.cancel()
    retry = asyncio.create_task(answers.once("id", b"x", make))
    await asyncio.sleep(0)
    make.gate.set()
    assert await retry == 1
    assert make.calls == 1


async def test_old_answers_are_forgotten() -> None:
    answers, make = FirstAnswers[int](keep=2), Counter()
    for name in "abc":
        await answers.once(name, b"x", make)
    assert await answers.once("a", b"x", make) == 4


async def test_request_without_an_id_is_always_new() -> None:
    answers, make = FirstAnswers[int](), Counter()
    assert [await answers.once("", b"x", make) for _ in range(2)] == [1, 2]
    answers.check("", b"y")


async def test_what_was_checked_under_an_id_is_all_that_it_stands_for() -> None:
    answers = FirstAnswers[int]()
    answers.check("id", b"x")
    answers.check("id", b"x")
    with pytest.raises(MeshError, match="'id' was used for another request"):
        answers.check("id", b"y")


def test_an_id_that_was_admitted_is_refused_until_it_is_old_and_over() -> None:
    seen = SeenRequests()
    seen.admit("long", 0.0)
    with pytest.raises(MeshError, match="request long was admitted before"):
        seen.refuse("long", REMEMBERED_S - 1.0)
    with pytest.raises(MeshError, match="request long was admitted before"):
        seen.refuse("long", 2 * REMEMBERED_S, running={"long"})
    seen.refuse("long", 2 * REMEMBERED_S)
    for number in range(REMEMBERED_REQUESTS + 5):
        seen.admit(f"r{number}", 2 * REMEMBERED_S)
        seen.refuse("new", 2 * REMEMBERED_S)
    assert len(seen) == REMEMBERED_REQUESTS
