"""The orchestrator's part of a checkpoint: totals and the place in the tasks, for a run that is resumed without its
ledger."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from loguru import logger

from meshrl.core.durable import json_checksum, write_file
from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.rows import StepRecord
from meshrl.orchestrator.work.screening import RunTotals
from meshrl.sampling.retry import RunError
from meshrl.wire.saved_steps import step_folder


def state_path(layout: Layout, step: int) -> Path:
    return step_folder(layout.checkpoints, step) / "orchestrator" / "progress.json"


def write_state(layout: Layout, record: StepRecord) -> None:
    """Written whole or not at all. A disk error does not end the run."""
    path = state_path(layout, record.step)
    state: dict[str, object] = {"step": record.step, **asdict(record.progress), "drawn": dict(record.drawn)}
    if record.algorithms:
        state["algorithms"] = record.algorithms
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({**state, "crc32": json_checksum(state)}))
    except OSError as error:
        logger.warning(f"the orchestrator's part of checkpoint {record.step} was not written: {error}")


def read_state(layout: Layout, step: int) -> tuple[RunTotals, dict[str, int], dict[str, dict[str, float]]]:
    """Totals, tasks drawn and algorithms' state; zeros without a checkpoint. Raises RunError for a damaged file."""
    path = state_path(layout, step)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state.pop("crc32") != json_checksum(state):
            raise ValueError("it does not have the checksum it was written with")
        totals = RunTotals(tokens=state["tokens"], samples=state["samples"], problems=state["problems"])
        return totals, state["drawn"], state.get("algorithms", {})
    except FileNotFoundError:
        return RunTotals(), {}, {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}, which has the run's totals up to step {step}, is damaged ({error}); resume another step with"
            " --ckpt.resume-step, or delete that file: totals and tasks count from 0 then"
        ) from error
