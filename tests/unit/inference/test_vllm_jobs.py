"""Weight jobs of a vLLM worker; needs no vLLM."""

import asyncio
import threading

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

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.looks = 0

    async def collective_rpc(self, method: str, **how: object) -> list[JobOutcome | None]:
        assert method == "meshrl_outcome"
        self.looks += 1
        return [job.outcome for job in self.jobs]


async def test_workers_are_looked_at_when_a_job_ends_and_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LOOK_S", (0.001, 3600.0))
    workers, go = Workers(), [threading.Event(), threading.Event()]
    engine = calls.EngineCalls(workers)  # type: ignore[arg-type]  # all that it uses of an AsyncLLM
    workers.jobs = [Job(lambda one=one: assert_set(one), CPU, ends=engine.ends.address) for one in go]
    waiting = asyncio.create_task(engine.wait_for_job(DEADLINE_S))
    await asyncio.sleep(0.2)
    assert workers.looks == 1  # before it was asked every 5 ms
    go[1].set()
    go[0].set()
    await asyncio.wait_for(waiting, DEADLINE_S)
    engine.ends.close()


async def test_a_job_that_fails_wakes_its_engine_and_one_without_end_has_a_deadline() -> None:
    workers = Workers()
    engine = calls.EngineCalls(workers)  # type: ignore[arg-type]  # as above
    workers.jobs = [Job(lambda: 1 / 0, CPU, ends=engine.ends.address)]
    with pytest.raises(MeshError, match="division by zero"):
        await asyncio.wait_for(engine.wait_for_job(DEADLINE_S), DEADLINE_S)
    go = threading.Event()
    workers.jobs = [Job(lambda: assert_set(go), CPU, ends=engine.ends.address)]
    with pytest.raises(MeshError) as caught:
        await engine.wait_for_job(-1.0)
    assert caught.value.reason is Reason.DEADLINE_PASSED
    go.set()
    engine.ends.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)
