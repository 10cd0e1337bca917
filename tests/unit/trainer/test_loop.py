"""A batch becomes a version: what a step reports, publishes and gives back, and what ends the trainer."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshrl.models.state import gather_state
from meshrl.trainer.build import releaser
from meshrl.versions.progress import Progress
from meshrl.wire.errors import MeshError
from meshrl.wire.types import StepState
from polling import until
from training_loop import DEADLINE_S, REPORT, ROLLOUT_TRACE, STEP_TRACE, batch, running


async def test_batch_becomes_a_published_version_with_metrics(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        before = gather_state(trainer.trained.model)
        trainer.queue.submit(batch(1), "a")
        event = await trainer.until(StepState.DONE, 1)
        assert event.version == 1
        published = trainer.hub.versions[1]
        assert any(not torch.equal(tensor, before[name]) for name, tensor in published.items())
        stages = [
            "wait_for_batch",
            "broadcast_batch",
            "forward_backward",
            "optimizer",
            "wait_for_publication",
            "gather_weights",
        ]
        assert set(event.timings_s) == {*stages, "publish", "publish_write", "step"}
        assert 0 < sum(event.timings_s[stage] for stage in stages) <= event.timings_s["step"] + 1e-6
        assert all(event.metrics[f"time/{stage}"] == event.timings_s[stage] for stage in stages)
        wanted = """loss/mean mismatch_kl/all/mean mismatch_kl/env/max mismatch_kl/all/std entropy/env/mean
            mismatch_abs/all/mean masked_advantage_positive/mean masked_advantage_negative/mean
            optim/grad_norm optim/lr optim/zero_grad_ratio
            perf/throughput perf/throughput_per_gpu perf/mfu perf/peak_memory time/step time/wait_for_batch
            time/forward_backward time/save_ckpt progress/total_tokens progress/total_samples"""
        assert set(wanted.split()) <= set(event.metrics)
        assert event.metrics["progress/total_tokens"] == 12
        totals_of_the_run = {"progress/tokens", "progress/samples", "progress/problems"}  # the orchestrator's
        assert not totals_of_the_run & set(event.metrics)
        assert event.metrics["perf/throughput"] > 0


async def test_next_step_trains_while_a_version_is_published_and_done_waits_for_the_seal(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.hub.held = True
        trainer.queue.submit(batch(1), "a")
        trainer.queue.submit(batch(2), "b")
        await trainer.until(StepState.RUNNING, 2)
        assert trainer.queue.book.info().version == 0
        (await trainer.hub.next_pending()).set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 1)).version == 1
        (await trainer.hub.next_pending()).set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 2)).version == 2


class Moving(Progress):
    """Has always just moved."""

    looks = 0

    def left_s(self, stall_s: float) -> float:
        self.looks += 1
        return 0.01


async def test_a_publication_that_moves_may_take_longer_than_its_deadline(tmp_path: Path) -> None:
    moving = Moving()
    async with running(tmp_path, publish_deadline_s=0.05, progress=moving) as trainer:
        trainer.hub.held = True
        trainer.queue.submit(batch(1), "a")
        trainer.queue.submit(batch(2), "b")
        first = await trainer.hub.next_pending()
        await until(lambda: moving.looks > 20)
        assert trainer.error is None
        first.set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 1)).version == 1
        (await trainer.hub.next_pending()).set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 2)).version == 2


async def test_a_publication_that_stands_still_ends_the_trainer_with_a_sentence(tmp_path: Path) -> None:
    async with running(tmp_path, publish_deadline_s=0.2) as trainer:
        trainer.hub.held = True
        trainer.queue.submit(batch(1), "a")
        trainer.queue.submit(batch(2), "b")
        await trainer.ended()
    assert isinstance(trainer.error, MeshError)
    assert trainer.error.message == (
        "version 1 could not be published: nothing moved for 0.2 s (publish_deadline_s); "
        "look whether the weight hub and its disk are well"
    )


async def test_failed_step_leaves_weights_and_the_trainer_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        before = gather_state(trainer.trained.model)
        trainer.queue.submit(batch(1, advantage=float("inf")), "a")
        event = await trainer.until(StepState.FAILED, 1)
        assert event.reason == "STEP_FAILED"
        assert "not finite" in event.message
        assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trainer.trained.model).items())
        assert trainer.hub.versions == {}
        trainer.queue.submit(batch(1), "b")
        assert (await trainer.until(StepState.DONE, 1)).version == 1


async def test_failed_publication_ends_the_trainer(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.hub.held = True
        trainer.queue.submit(batch(1), "a")
        (await trainer.hub.next_pending()).set_exception(OSError("no space left"))
        event = await trainer.until(StepState.FAILED, 1)
        assert "version 1 could not be published: no space left" in event.message
        await trainer.ended()
        assert isinstance(trainer.error, OSError)


async def test_step_span_links_its_rollouts_and_has_its_stages(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.queue.submit(batch(1), "a")
        event = await trainer.until(StepState.DONE, 1)
        spans = trainer.spans()
        train = spans["rl.train"]
        assert train.context is not None
        assert f"{train.context.trace_id:032x}" == STEP_TRACE.split("-")[1]
        assert [f"{link.context.span_id:016x}" for link in train.links] == [ROLLOUT_TRACE.split("-")[2]]
        assert event.traceparent == trainer.hub.traceparents[0]
        assert event.traceparent.split("-")[2] == f"{train.context.span_id:016x}"
        assert {name for name in spans if name != "rl.train"} == {
            "rl.train.forward_backward",
            "rl.train.optimizer",
            "rl.train.publish",
        }


async def test_drain_finishes_what_is_queued(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.queue.submit(batch(1), "a")
        trainer.queue.submit(replace(batch(2)), "b")
        async with asyncio.timeout(DEADLINE_S):
            await trainer.queue.drain()
            assert trainer.queue.book.step == 2


async def test_memory_is_given_back_after_each_step_before_its_version_is_published(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        for step in (1, 2):
            trainer.queue.submit(batch(step), str(step))
            await trainer.until(StepState.DONE, step)
        assert trainer.released_after == [[], [1]]


def test_memory_is_given_back_where_it_is_wanted_and_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    for device, wanted in (("cpu", True), ("cuda", False), ("cuda", True)):
        releaser(torch.device(device), wanted=wanted)()
    assert calls == ["emptied"]
