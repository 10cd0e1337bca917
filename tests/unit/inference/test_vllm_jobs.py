"""Weight jobs of a vLLM worker; needs no vLLM."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

from meshrl.inference.vllm import calls
from meshrl.inference.vllm.jobs import Job, JobOutcome
from meshrl.wire.errors import MeshError, Reason

CPU = torch.device("cpu")
DEADLINE_S = 30.0


def test_job_that_takes_anothers_place_is_started_at_once_and_works_after_it() -> None:
    go, done = threading.Event(), []

    def first() -> None:
        assert go.wait(DEADLINE_S)
        done.append("first")

    before = Job(first, CPU)
    after = Job(lambda: done.append("second"), CPU, after=before)  # returns though the one before is at work
    assert (done, after.outcome) == ([], None)
    go.set()
    assert after.join(DEADLINE_S)
    assert done == ["first", "second"]
    assert after.outcome is not None
    assert after.outcome["seconds"] >= 0.0


def test_failure_of_the_job_before_is_not_the_next_ones() -> None:
    def fail() -> None:
        raise ValueError("odd weights")

    before = Job(fail, CPU)
    after = Job(lambda: None, CPU, after=before)
    assert after.join(DEADLINE_S)
    assert before.outcome == {"reason": "LAYOUT_MISMATCH", "message": "ValueError: odd weights"}
    assert after.outcome is not None
    assert "seconds" in after.outcome


def test_job_that_runs_out_of_memory_is_named_so_with_what_to_set() -> None:
    job = Job(
        lambda: torch.empty(2**50, dtype=torch.uint8).fill_(1), CPU, doing="staging version 3"
    )  # really asked for
    assert job.join(DEADLINE_S)
    assert job.outcome is not None
    assert job.outcome["reason"] == "OUT_OF_MEMORY"
    assert job.outcome["message"].startswith(
        "staging version 3 ran out of memory on cpu: 1125899906842624 bytes more were asked for; "
        "lower inference.gpu_memory_utilization"
    )


def test_job_whose_predecessor_never_ends_fails_in_one_sentence() -> None:
    go = threading.Event()
    before = Job(lambda: assert_set(go), CPU)
    after = Job(lambda: None, CPU, after=before, before_deadline_s=0.01)
    assert after.join(DEADLINE_S)
    assert after.outcome == {
        "reason": "DEADLINE_PASSED",
        "message": "the weight job before this one did not end within 0.01 s",
    }
    go.set()
    assert before.join(DEADLINE_S)


class Workers:
    """Two workers as vLLM calls them: with the answers of all to each call."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.works = works
        self.jobs: list[Job] = []
        self.looks = 0
        self.engine = calls.EngineCalls(self)  # type: ignore[arg-type]  # all that it uses of an AsyncLLM

    async def collective_rpc(self, method: str, **how: object) -> list[JobOutcome | None]:
        if method == "begin":
            self.jobs = [Job(work, CPU, ends=self.engine.ends.address) for work in self.works]
            return [None for _ in self.jobs]
        self.looks += 1
        return [job.outcome for job in self.jobs]


async def test_workers_are_looked_at_when_a_job_ends_and_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LOOK_S", (0.001, 3600.0))
    go = [threading.Event(), threading.Event()]
    workers = Workers(*(lambda one=one: assert_set(one) for one in go))
    for _ in range(2):  # the end of the second worker, of which nobody heard, is none of the job after it
        looks = workers.looks
        doing = asyncio.create_task(workers.engine.job("begin", deadline_s=DEADLINE_S))
        await asyncio.sleep(0.2)
        assert workers.looks == looks
        for one in (go[1], go[0]):
            one.set()
        await asyncio.wait_for(doing, DEADLINE_S)
        for job, one in zip(workers.jobs, go, strict=True):
            assert job.join(DEADLINE_S)
            one.clear()
    workers.engine.ends.close()


async def test_a_job_that_fails_wakes_its_engine_and_one_without_end_has_a_deadline() -> None:
    def divide() -> None:
        raise ZeroDivisionError("division by zero")

    failing = Workers(divide)
    with pytest.raises(MeshError, match="division by zero"):
        await asyncio.wait_for(failing.engine.job("begin", deadline_s=DEADLINE_S), DEADLINE_S)
    failing.engine.ends.close()
    go = threading.Event()
    endless = Workers(lambda: assert_set(go))
    with pytest.raises(MeshError) as caught:
        await endless.engine.job("begin", deadline_s=-1.0)
    assert caught.value.reason is Reason.DEADLINE_PASSED
    go.set()
    endless.engine.ends.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)
