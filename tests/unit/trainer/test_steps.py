from collections.abc import Sized

import numpy as np
import pytest

from meshrl.trainer.runs.steps import LARGE_EVENTS, StepBook
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, StepState


def batch(step: int) -> Batch:
    return Batch(run_id="main", step=step, micro_batches=(), loss_tokens=1, environments=("env",))


def book(**settings: int) -> StepBook:
    return StepBook(run_id="main", epoch=3, **settings)


def submit(steps: StepBook, step: int, digest: str = "a") -> int:
    return steps.accept(batch(step), digest).queue_position


def run(steps: StepBook) -> int:
    taken = steps.take()
    assert taken is not None
    return taken.step


def done(steps: StepBook, step: int) -> None:
    steps.finish(step, metrics={"loss/mean": 1.0}, timings_s={"step": 2.0})


def reason_of(steps: StepBook, step: int, digest: str = "a") -> Reason:
    with pytest.raises(MeshError) as caught:
        steps.accept(batch(step), digest)
    return caught.value.reason


def test_step_goes_from_queued_to_done_and_becomes_a_version() -> None:
    steps = book()
    submit(steps, 1)
    assert run(steps) == 1
    done(steps, 1)
    states = [(event.revision, event.step, event.state, event.version) for event in steps.events_after(0)]
    assert states == [
        (1, 1, StepState.QUEUED, None),
        (2, 1, StepState.RUNNING, None),
        (3, 1, StepState.DONE, 1),
    ]
    info = steps.info()
    assert (info.step, info.version, info.epoch, info.revision) == (1, 1, 3, 3)
    assert steps.idle


def test_queue_position_counts_batches_ahead() -> None:
    steps = book()
    assert submit(steps, 1) == 0
    assert submit(steps, 2) == 1
    assert run(steps) == 1
    assert submit(steps, 3) == 2


def test_same_batch_again_returns_the_first_answer_at_any_time() -> None:
    steps = book(max_queued=1)
    first = steps.accept(batch(1), "a")
    assert steps.accept(batch(1), "a") == first
    run(steps)
    assert steps.accept(batch(1), "a") == first
    done(steps, 1)
    steps.draining = True
    assert steps.accept(batch(1), "a") == first
    assert len(steps.events_after(0)) == 3


def test_another_batch_for_a_known_step_is_a_conflict() -> None:
    steps = book()
    submit(steps, 1)
    assert reason_of(steps, 1, "b") is Reason.BATCH_CONFLICT
    run(steps)
    done(steps, 1)
    assert reason_of(steps, 1, "b") is Reason.BATCH_CONFLICT


def test_steps_come_in_order_without_gaps() -> None:
    steps = book(start_step=5)
    with pytest.raises(MeshError, match="the next step of run 'main' is 6") as ahead:
        steps.accept(batch(7), "a")
    assert ahead.value.reason is Reason.STEP_OUT_OF_ORDER
    assert reason_of(steps, 5) is Reason.STEP_OUT_OF_ORDER
    submit(steps, 6)


def test_full_queue_asks_to_come_back() -> None:
    steps = book(max_queued=2)
    submit(steps, 1)
    submit(steps, 2)
    with pytest.raises(MeshError) as caught:
        steps.admit(3, "a")
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_after_s == 0.5
    run(steps)
    submit(steps, 3)


def test_steps_beyond_max_steps_are_refused() -> None:
    steps = book(max_steps=1)
    submit(steps, 1)
    assert reason_of(steps, 2) is Reason.STEP_OUT_OF_ORDER


def test_draining_refuses_new_steps_and_keeps_queued_ones() -> None:
    steps = book()
    submit(steps, 1)
    steps.draining = True
    assert reason_of(steps, 2) is Reason.DRAINING
    assert not steps.idle
    assert run(steps) == 1
    done(steps, 1)
    assert steps.idle


def test_failed_step_takes_those_behind_it_along_and_is_next_again() -> None:
    steps = book()
    submit(steps, 1)
    submit(steps, 2)
    run(steps)
    steps.fail(1, Reason.STEP_FAILED, "not finite")
    failed = [(event.step, event.reason) for event in steps.events_after(0) if event.state is StepState.FAILED]
    assert failed == [(1, "STEP_FAILED"), (2, "STEP_FAILED")]
    assert steps.take() is None
    assert steps.info().step == 0
    assert reason_of(steps, 2, "b") is Reason.BATCH_CONFLICT
    submit(steps, 1, "b")
    submit(steps, 2, "b")
    assert run(steps) == 1


def test_failed_batch_submitted_again_unchanged_gets_its_first_answer() -> None:
    steps = book()
    answer = steps.accept(batch(1), "a")
    run(steps)
    steps.fail(1, Reason.STEP_FAILED, "not finite")
    assert steps.accept(batch(1), "a") == answer
    assert steps.take() is None


def test_a_step_may_run_while_the_one_before_is_published() -> None:
    steps = book()
    submit(steps, 1)
    submit(steps, 2)
    assert (run(steps), run(steps)) == (1, 2)
    done(steps, 1)
    assert steps.info().step == 1
    assert not steps.idle
    done(steps, 2)
    assert steps.info().step == 2


def test_crash_fails_everything_unfinished() -> None:
    steps = book()
    submit(steps, 1)
    submit(steps, 2)
    run(steps)
    run(steps)
    submit(steps, 3)
    steps.fail_all(Reason.STEP_FAILED, "the disk is gone")
    failed = {event.step for event in steps.events_after(0) if event.state is StepState.FAILED}
    assert failed == {1, 2, 3}
    assert steps.idle


def test_revisions_that_are_gone_or_not_yet_made_are_expired() -> None:
    steps = book(history_events=16)
    for step in range(1, 11):
        submit(steps, step)
        run(steps)
        done(steps, step)
    assert [event.revision for event in steps.events_after(14)] == list(range(15, 31))
    for revision in (13, 31):
        with pytest.raises(MeshError) as caught:
            steps.events_after(revision)
        assert caught.value.reason is Reason.REVISION_EXPIRED


def test_what_a_long_run_holds_of_its_steps_is_bounded_without_being_asked() -> None:
    steps = book()
    for step in range(1, 1501):
        submit(steps, step)
        run(steps)
        done(steps, step)
    held = {name: len(value) for name, value in vars(steps).items() if isinstance(value, Sized)}
    assert held["_events"] == 1000
    assert max(held.values()) == 1000


def test_only_the_newest_events_keep_logprobs_and_entropies() -> None:
    steps = book()
    for step in range(1, LARGE_EVENTS + 3):
        submit(steps, step)
        run(steps)
        logprobs = {"a": np.array([-0.5], dtype=np.float32)}
        steps.finish(step, metrics={}, timings_s={}, logprobs=logprobs, entropies=np.ones(3, dtype=np.float32))
    events = [event for event in steps.events_after(0) if event.state is StepState.DONE]
    assert [len(event.logprobs) for event in events] == [0, 0] + [1] * LARGE_EVENTS
    assert [event.entropies is not None for event in events] == [False] * 2 + [True] * LARGE_EVENTS


def test_events_and_the_run_name_the_last_step_on_disk() -> None:
    steps = book(start_step=4, durable_step=4)
    submit(steps, 5)
    run(steps)
    done(steps, 5)
    steps.saved(5)
    steps.saved(3)  # an older checkpoint, written late, takes nothing back
    assert steps.info().durable_step == 5
    submit(steps, 6)
    assert [event.durable_step for event in steps.events_after(0)] == [4, 4, 4, 5]
