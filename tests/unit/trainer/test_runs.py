"""The table of a trainer's runs: its own is found by name, no other is, and none comes or goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.table import RunTable, TrainerRun
from meshrl.trainer.runs.work_queue import TrainingQueue
from meshrl.wire.errors import MeshError, Reason


@pytest.fixture
async def run() -> TrainerRun:
    unused: Any = SimpleNamespace()
    return TrainerRun(
        queue=TrainingQueue(StepBook(run_id="main", epoch=2, start_step=5)),
        state=unused,
        learner=unused,
        checkpointer=unused,
    )


async def test_the_own_run_is_found_by_its_name_and_by_none(run: TrainerRun) -> None:
    table = RunTable(run)
    assert table.find("main") is table.find("") is run
    assert [each.info().run_id for each in table] == ["main"]
    assert (run.info().version, run.info().epoch) == (5, 2)


@pytest.mark.parametrize(
    ("request_name", "run_id", "reason"),
    [
        ("find", "other", Reason.UNKNOWN_RUN),
        ("create", "main", Reason.RUN_EXISTS),
        ("create", "other", Reason.RUN_LIMIT_REACHED),
        ("delete", "main", Reason.RUN_PROTECTED),
        ("delete", "other", Reason.UNKNOWN_RUN),
    ],
)
async def test_other_runs_are_refused(run: TrainerRun, request_name: str, run_id: str, reason: Reason) -> None:
    with pytest.raises(MeshError, match="main") as caught:
        getattr(RunTable(run), request_name)(run_id)
    assert caught.value.reason is reason
