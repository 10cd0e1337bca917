"""Weight jobs of a vLLM worker; needs no vLLM."""

import threading

import torch

from meshrl.inference.vllm.jobs import Job

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


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)
