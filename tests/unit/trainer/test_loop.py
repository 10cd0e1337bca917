"""The training loop on its own thread against a real desk and learner; only the hub is a list."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshrl.algorithms.losses import aipo_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.state import gather_state
from meshrl.trainer.desk import TrainerDesk
from meshrl.trainer.loop import TrainLoop
from meshrl.trainer.memory import releaser
from meshrl.trainer.orders import Orders
from meshrl.trainer.spans import StepSpans
from meshrl.trainer.steps import StepBook
from meshrl.trainer.uploading import PublishReport
from meshrl.training.checkpoint import Checkpointer, CheckpointError
from meshrl.training.config import CheckpointConfig, OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner, UpdateError
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, StepEvent, StepState

ROLLOUT_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REPORT = PublishReport(version=1, artifact_id="", root=b"", num_bytes=0, write_s=0.25)
STEP_TRACE = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


def build(**optim: str) -> Learner:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return Learner(
        PackedPolicy(Qwen3ForCausalLM(config)),
        objective=Objective(loss=partial(aipo_loss, delta=4.0), name="aipo"),
        optim=OptimConfig.model_validate({"lr": 1e-2, **optim}),
        scheduler=SchedulerConfig(),
        max_steps=None,
    )


def batch(step: int, *, advantage: float = 1.0) -> Batch:
    sample = TrainSample(
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.arange(6) >= 2,
        logprobs=np.full(6, -2.0, np.float32),
        advantage=advantage,
        traceparent=ROLLOUT_TRACE,
    )
    packing = pack_samples([sample, sample], seq_len=16)
    return Batch(
        run_id="main",
        step=step,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("env",),
        traceparent=STEP_TRACE,
    )


class Hub:
    """Takes versions; each publication waits for the test when `held`."""

    def __init__(self) -> None:
        self.versions: dict[int, Mapping[str, torch.Tensor]] = {}
        self.traceparents: list[str] = []
        self.held = False
        self.pending: list[Future[Any]] = []
        self._arrivals: queue.Queue[Future[Any]] = queue.Queue()

    def publish(self, version: int, weights: Mapping[str, torch.Tensor], traceparent: str) -> Future[Any]:
        self.versions[version] = weights
        self.traceparents.append(traceparent)
        done: Future[Any] = Future()
        if self.held:
            self.pending.append(done)
            self._arrivals.put(done)
        else:
            done.set_result(REPORT)
        return done

    async def next_pending(self) -> Future[Any]:
        return await asyncio.to_thread(self._arrivals.get, True, 10)


class Running:
    def __init__(self, learner: Learner, folder: Path, ckpt: CheckpointConfig | None) -> None:
        self.learner = learner
        self.hub = Hub()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.desk = TrainerDesk(StepBook(run_id="main", epoch=1, start_step=learner.step_done))
        self.checkpointer = Checkpointer(learner, folder, tokenizer=None)
        self.error: BaseException | None = None
        self.loop = TrainLoop(
            learner,
            self.desk,
            lambda version: gather_state(learner.model),
            self.hub.publish,
            self.checkpointer,
            StepSpans(provider.get_tracer("test")),
            Orders(learner.parallel),
            ckpt=ckpt,
            publish_deadline_s=10.0,
            release=lambda: self.released_after.append(sorted(self.hub.versions)),
        )
        self.released_after: list[list[int]] = []  # versions that were published when memory was given back
        self.thread = threading.Thread(target=self._run, daemon=True)  # a test that fails must not hang the others

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at whatever ended the thread
            self.error = error

    async def until(self, state: StepState, step: int) -> StepEvent:
        async with asyncio.timeout(10):
            async for event in self.desk.watch(0):
                if (event.step, event.state) == (step, state):
                    return event
        raise AssertionError(f"no {state} for step {step}")

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join, 10)
        assert not self.thread.is_alive()

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@asynccontextmanager
async def running(
    folder: Path, ckpt: CheckpointConfig | None = None, learner: Learner | None = None
) -> AsyncIterator[Running]:
    trainer = Running(learner or build(), folder, ckpt)
    trainer.thread.start()
    try:
        yield trainer
    finally:
        for pending in trainer.hub.pending:
            if not pending.done():
                pending.set_result(REPORT)
        trainer.desk.close()
        await trainer.ended()


async def test_batch_becomes_a_published_version_with_metrics(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        before = gather_state(trainer.learner.model)
        trainer.desk.submit(batch(1), "a")
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
        trainer.desk.submit(batch(1), "a")
        trainer.desk.submit(batch(2), "b")
        await trainer.until(StepState.RUNNING, 2)
        assert trainer.desk.book.info().version == 0
        (await trainer.hub.next_pending()).set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 1)).version == 1
        (await trainer.hub.next_pending()).set_result(REPORT)
        assert (await trainer.until(StepState.DONE, 2)).version == 2


async def test_failed_step_leaves_weights_and_the_trainer_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        before = gather_state(trainer.learner.model)
        trainer.desk.submit(batch(1, advantage=float("inf")), "a")
        event = await trainer.until(StepState.FAILED, 1)
        assert event.reason == "STEP_FAILED"
        assert "not finite" in event.message
        assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trainer.learner.model).items())
        assert trainer.hub.versions == {}
        trainer.desk.submit(batch(1), "b")
        assert (await trainer.until(StepState.DONE, 1)).version == 1


async def test_failed_publication_ends_the_trainer(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.hub.held = True
        trainer.desk.submit(batch(1), "a")
        (await trainer.hub.next_pending()).set_exception(OSError("no space left"))
        event = await trainer.until(StepState.FAILED, 1)
        assert "version 1 could not be published: no space left" in event.message
        await trainer.ended()
        assert isinstance(trainer.error, OSError)


async def test_step_span_links_its_rollouts_and_has_its_stages(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.desk.submit(batch(1), "a")
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


async def test_checkpoints_at_interval_and_at_the_end_keep_the_last(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, keep_last=2)) as trainer:
        for step in (1, 2, 3):
            trainer.desk.submit(batch(step), str(step))
            event = await trainer.until(StepState.DONE, step)
            assert event.durable_step in (step - 1, step)  # the version is published while the checkpoint is written
    assert trainer.desk.book.info().durable_step == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_2", "step_3"]


async def test_checkpoints_in_the_background_are_all_on_disk_at_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, keep_last=2, save_async=True)) as trainer:
        for step in (1, 2, 3):
            trainer.desk.submit(batch(step), str(step))
            assert (await trainer.until(StepState.DONE, step)).durable_step < step
        trainer.desk.close()
        await trainer.ended()
        assert trainer.error is None
        await asyncio.sleep(0)  # the last news of the training thread
    assert trainer.desk.book.info().durable_step == trainer.checkpointer.durable_step == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]


async def test_a_checkpoint_that_fails_in_the_background_ends_the_trainer_and_is_never_durable(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, save_async=True)) as trainer:
        (tmp_path / "checkpoints").write_text("a file where a folder should be")
        trainer.desk.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)
        trainer.desk.submit(batch(2), "2")
        await trainer.ended()
    assert isinstance(trainer.error, CheckpointError)
    assert "could not start a checkpoint" in str(trainer.error)
    assert trainer.desk.book.info().durable_step == 0


async def test_a_checkpoint_that_was_asked_for_and_fails_is_the_callers_news(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        (tmp_path / "checkpoints").write_text("a file where a folder should be")
        with pytest.raises(MeshError, match="could not start a checkpoint") as raised:
            await trainer.desk.save_checkpoint(weights_only=False)
        assert raised.value.reason is Reason.CHECKPOINT_FAILED
        trainer.desk.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)


@pytest.mark.parametrize("ckpt", [CheckpointConfig(keep_last=2), CheckpointConfig(), None])
async def test_checkpoints_that_are_asked_for_are_pruned_as_configured(
    tmp_path: Path, ckpt: CheckpointConfig | None
) -> None:
    async with running(tmp_path, ckpt) as trainer:
        for step in range(1, 5):
            trainer.desk.submit(batch(step), str(step))
            await trainer.until(StepState.DONE, step)
            saved, path = await trainer.desk.save_checkpoint(weights_only=False)
            assert saved == step
            assert (path / "checkpoint.json").is_file()
        await trainer.desk.save_checkpoint(weights_only=True)
        kept = ["step_3", "step_4"] if ckpt and ckpt.keep_last else [f"step_{step}" for step in range(1, 5)]
        for root in ("checkpoints", "weights"):
            assert sorted(path.name for path in (tmp_path / root).iterdir()) == kept


async def test_weights_that_are_half_updated_end_the_trainer_and_are_never_used(tmp_path: Path) -> None:
    learner = build(type="muon")

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async with running(tmp_path, CheckpointConfig(interval=1), learner) as trainer:
        trainer.desk.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)
        whole = gather_state(learner.model)
        learner.optimizer.parts[1].register_step_pre_hook(no_memory)
        trainer.desk.submit(batch(2), "2")
        failed = await trainer.until(StepState.FAILED, 2)
        await trainer.ended()
    assert isinstance(trainer.error, UpdateError)
    assert "the trainer stopped: step 2: the optimizer failed in the midst of its step" in failed.message
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in gather_state(learner.model).items())
    assert sorted(trainer.hub.versions) == [1]
    resumed = build(type="muon")
    assert Checkpointer(resumed, tmp_path, tokenizer=None).restore(-1) == 1
    assert all(torch.equal(tensor, whole[name]) for name, tensor in gather_state(resumed.model).items())


async def test_totals_go_on_where_a_checkpoint_left_them(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig()) as trainer:
        trainer.desk.submit(batch(1), "1")
        first = (await trainer.until(StepState.DONE, 1)).metrics
    resumed = build()
    async with running(tmp_path, learner=resumed) as trainer:
        trainer.checkpointer.restore(-1)
        trainer.desk.book = StepBook(run_id="main", epoch=2, start_step=1)
        trainer.desk.submit(batch(2), "2")
        second = (await trainer.until(StepState.DONE, 2)).metrics
    assert (first["progress/total_tokens"], second["progress/total_tokens"]) == (12, 24)
    assert (first["progress/total_samples"], second["progress/total_samples"]) == (2, 4)


async def test_checkpoint_at_the_end_only_by_default(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig()) as trainer:
        trainer.desk.submit(batch(1), "a")
        await trainer.until(StepState.DONE, 1)
        assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "checkpoints" / "step_1" / "trainer").is_dir()


async def test_resumed_trainer_continues_to_the_bit(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig()) as trainer:
        trainer.desk.submit(batch(1), "a")
        await trainer.until(StepState.DONE, 1)
        step, path = await trainer.desk.save_checkpoint(weights_only=False)
        assert (step, path) == (1, tmp_path / "checkpoints" / "step_1" / "trainer")
        trainer.desk.submit(batch(2), "b")
        await trainer.until(StepState.DONE, 2)
        expected = trainer.hub.versions[2]
    resumed = build()
    assert Checkpointer(resumed, tmp_path, tokenizer=None).restore(1) == 1
    async with running(tmp_path / "second", learner=resumed) as trainer:
        trainer.desk.submit(batch(2), "b")
        assert (await trainer.until(StepState.DONE, 2)).version == 2
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.hub.versions[2].items())


async def test_snapshot_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        _, path = await trainer.desk.save_checkpoint(weights_only=True)
        loaded = Qwen3ForCausalLM.from_pretrained(path)
        assert path == tmp_path / "weights" / "step_0"
        assert all(
            torch.equal(t, gather_state(loaded)[name]) for name, t in gather_state(trainer.learner.model).items()
        )
        assert not (tmp_path / "checkpoints").exists()


def test_missing_checkpoint_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot resume from step 4: .* holds steps none"):
        Checkpointer(build(), tmp_path, tokenizer=None).restore(4)


async def test_drain_finishes_what_is_queued(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.desk.submit(batch(1), "a")
        trainer.desk.submit(replace(batch(2)), "b")
        async with asyncio.timeout(10):
            assert await trainer.desk.drain() == 2


async def test_memory_is_given_back_after_each_step_before_its_version_is_published(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        for step in (1, 2):
            trainer.desk.submit(batch(step), str(step))
            await trainer.until(StepState.DONE, step)
        assert trainer.released_after == [[], [1]]


def test_memory_is_given_back_where_it_is_wanted_and_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    for device, wanted in (("cpu", True), ("cuda", False), ("cuda", True)):
        releaser(torch.device(device), wanted=wanted)()
    assert calls == ["emptied"]
