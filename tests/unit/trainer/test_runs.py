"""The table of a trainer's runs and the loop over them: each is found by its name, and they train in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import trace

from meshrl.trainer.loop import TrainerLoop
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.trainer.run_training import RunTraining, RunVersions
from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig
from meshrl.training.run_state import RunState
from meshrl.versions.progress import Progress
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import StepState
from training_loop import DEADLINE_S, REPORT, batch, build


async def test_a_run_is_found_by_its_name_and_the_only_one_by_none() -> None:
    alone = RunTable(StepBook(run_id="main", epoch=2))
    assert alone.find("main") is alone.find("") is alone.own
    table = RunTable(StepBook(run_id="main", epoch=2, start_step=5))
    table.put(TrainingQueue(StepBook(run_id="second", epoch=1), table.changed))
    assert table.find("main") is table.own
    with pytest.raises(MeshError, match="run_id: must name one of main, second") as unclear:
        table.find("")
    assert unclear.value.reason is Reason.INVALID_REQUEST
    assert [queue.book.info().run_id for queue in table] == ["main", "second"]
    assert (table.own.book.info().version, table.own.book.info().epoch) == (5, 2)
    with pytest.raises(MeshError, match="no run 'other' here; this trainer holds 'main', 'second'") as caught:
        table.find("other")
    assert caught.value.reason is Reason.UNKNOWN_RUN


async def test_a_run_that_may_still_come_is_to_be_asked_for_again() -> None:
    table = RunTable(StepBook(run_id="main", epoch=2), complete=False)
    with pytest.raises(MeshError, match="still makes the runs of its last start; try again") as caught:
        table.find("second")
    assert caught.value.retryable
    assert table.find("main") is table.own
    table.complete = True
    with pytest.raises(MeshError, match="no run 'second' here"):
        table.find("second")


async def test_runs_train_in_turn_and_one_fails_alone(tmp_path: Path) -> None:
    learner, first = build()
    second = RunState.of(
        learner.model,
        run_id="second",
        objective=first.objective,
        optim=first.optim,
        scheduler=first.scheduler,
        max_steps=None,
    )
    books = [StepBook(run_id=run_id, epoch=1, max_queued=3) for run_id in ("main", "second")]
    table = RunTable(books[0], held=True)
    table.put(TrainingQueue(books[1], table.changed, held=True))
    published: list[tuple[str, int]] = []
    commands = CommandSender(learner.parallel)

    def training(state: RunState) -> RunTraining:
        def publish(version: int, weights: Mapping[str, torch.Tensor], traceparent: str) -> Future[Any]:
            published.append((state.run_id, version))
            done: Future[Any] = Future()
            done.set_result(REPORT)
            return done

        return RunTraining(
            learner,
            state,
            table.find(state.run_id),
            Checkpointer(learner, state, tmp_path / state.run_id, tokenizer=None),
            RunVersions(capture=lambda version: {}, publish=publish, progress=Progress(), stall_s=DEADLINE_S),  # type: ignore[arg-type, return-value] # nobody looks at it
            commands,
            trace.NoOpTracer(),
            ckpt=CheckpointConfig(interval=2),
        )

    main, other = table.own, table.find("second")
    for queue, advantages in ((main, (1.0, 1.0, float("inf"))), (other, (1.0, 1.0, 1.0))):
        for step, advantage in enumerate(advantages, 1):
            queue.submit(batch(step, advantage=advantage), str(step))
    loop = asyncio.create_task(asyncio.to_thread(TrainerLoop(table, [training(first), training(second)], commands).run))
    for queue in table:
        queue.open()
    async with asyncio.timeout(DEADLINE_S):
        assert (await main.drain(), await other.drain()) == (2, 3)
        for queue in table:
            queue.close()
        await loop
    assert published == [("main", 1), ("second", 1), ("main", 2), ("second", 2), ("second", 3)]
    assert [(event.step, event.reason) for event in main.book.events_after(0) if event.state is StepState.FAILED] == [
        (3, "STEP_FAILED")
    ]
    saved = {
        run: sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("main", "second")
    }
    assert saved == {"main": ["step_2"], "second": ["step_2", "step_3"]}
