"""A training loop on its own thread with a real queue, learner and run; only the hub is a list."""

from __future__ import annotations

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
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshrl.algorithms.losses import aipo_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.state import gather_state
from meshrl.trainer.loop import TrainerLoop
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.trainer.ranks.rank_runs import RankRun
from meshrl.trainer.run_training import RunTraining, RunVersions
from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.table import RunTable
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig, OptimConfig
from meshrl.training.learner import Learner
from meshrl.versions.progress import Progress
from meshrl.wire.types import Batch, StepEvent, StepState
from tiny_qwen3 import tiny_qwen3
from trained import Trained

DEADLINE_S = 60.0
ROLLOUT_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REPORT = PublishReport(version=1, artifact_id="", root=b"", num_bytes=0, parts_s={"write": 0.25})
STEP_TRACE = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


def build(**optim: str) -> Trained:
    return Trained.by(
        Learner(PackedPolicy(tiny_qwen3())),
        Objective(loss=partial(aipo_loss, delta=4.0)),
        OptimConfig.model_validate({"lr": 1e-2, **optim}),
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
            done.set_result(replace(REPORT, version=version, artifact_id=f"artifact-{version}"))
        return done

    async def next_pending(self) -> Future[Any]:
        return await asyncio.to_thread(self._arrivals.get, True, DEADLINE_S)


class Running:
    """A trainer of one run, `main`, or that of `book`."""

    def __init__(
        self,
        folder: Path,
        ckpt: CheckpointConfig | None = None,
        trained: Trained | None = None,
        publish_deadline_s: float = DEADLINE_S,
        book: StepBook | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.trained = trained = trained or build()
        self.progress = progress or Progress()
        self.hub = Hub()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.table = RunTable(book or StepBook(run_id="main", epoch=1, start_step=trained.run.step_done))
        self.queue = self.table.own
        self.checkpointer = Checkpointer(*trained, folder, tokenizer=None)
        self.error: BaseException | None = None
        commands = CommandSender(trained.learner.parallel)
        training = RunTraining(
            trained.learner,
            RankRun(state=trained.run, checkpointer=self.checkpointer),
            self.queue,
            RunVersions(
                capture=lambda version: gather_state(trained.model),
                publish=self.hub.publish,
                progress=self.progress,
                stall_s=publish_deadline_s,
            ),
            commands,
            provider.get_tracer("test"),
            ckpt=ckpt,
            release=lambda: self.released_after.append(sorted(self.hub.versions)),
        )
        self.loop = TrainerLoop(self.table, training, commands)
        self.released_after: list[list[int]] = []  # versions that were published when memory was given back
        self.thread = threading.Thread(target=self._run, daemon=True)  # a test that fails must not hang the others

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at whatever ended the thread
            self.error = error

    async def until(self, state: StepState, step: int) -> StepEvent:
        async with asyncio.timeout(DEADLINE_S):
            async for event in self.queue.watch(0):
                if (event.step, event.state) == (step, state):
                    return event
        raise AssertionError(f"no {state} for step {step}")

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join, DEADLINE_S)
        assert not self.thread.is_alive()

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@asynccontextmanager
async def running(folder: Path, ckpt: CheckpointConfig | None = None, **more: Any) -> AsyncIterator[Running]:
    trainer = Running(folder, ckpt, **more)
    trainer.thread.start()
    try:
        yield trainer
    finally:
        for pending in trainer.hub.pending:
            if not pending.done():
                pending.set_result(REPORT)
        trainer.queue.close()
        await trainer.ended()
