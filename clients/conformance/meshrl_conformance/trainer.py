"""Checks of a TrainerService: answers and refusals, and with --full batches and a checkpoint."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire.convert.batches import batch_to_messages
from meshrl.wire.errors import Reason
from meshrl.wire.types import Batch, MicroBatch, capabilities
from meshrl_conformance.every_service import BOOKMARK_S, FAR_VERSION, bookmarks, since_1_1
from meshrl_conformance.probe import NotCheckedError, Probe, checks, must

TOKENS = 4
LOOK_S = 0.1
FAR_STEPS = 1_000_000  # beyond the next step: never queued, on whatever trainer
NOWHERE = "conformance: no such run"


async def _trainer(probe: Probe) -> Any:
    (answer,) = await probe.call("GetTrainer", pb.GetTrainerRequest())
    must(len(answer.runs) > 0, "GetTrainer tells no run")
    return answer


def _batch(trainer: Any, step: int, *, token: int = 1) -> Batch:
    """One row of one sample for each rank."""
    own = TOKENS // 2  # tokens of the policy
    row = MicroBatch(
        dp_rank=0,
        token_ids=np.full(TOKENS, token, np.int32),
        position_ids=np.arange(TOKENS, dtype=np.int32),
        loss_mask=np.arange(TOKENS) >= own,
        advantages=np.where(np.arange(TOKENS) >= own, 0.1, 0.0).astype(np.float32),
        inference_logprobs=np.where(np.arange(TOKENS) >= own, -1.0, 0.0).astype(np.float32),
        sample_offsets=np.array([0, TOKENS], np.int64),
        temperatures=np.ones(1, np.float32),
        env_index=np.zeros(1, np.int32),
        rollout_ids=(f"conformance-{uuid.uuid4()}",),
    )
    rows = tuple(replace(row, dp_rank=rank) for rank in range(max(1, trainer.dp_size)))
    return Batch(
        run_id=trainer.runs[0].run_id,
        step=step,
        micro_batches=rows,
        loss_tokens=own * len(rows),
        environments=("conformance",),
    )


@checks("trainer.info")
async def _info(probe: Probe) -> None:
    told = await _trainer(probe)
    for name in ("world_size", "dp_size", "seq_len", "pad_multiple"):
        must(getattr(told, name) > 0, f"GetTrainer tells {name} 0")
    must(all(run.run_id for run in told.runs), "GetTrainer tells a run without run_id")


@checks("trainer.runs")
async def _runs(probe: Probe) -> None:
    told = {run.run_id for run in (await _trainer(probe)).runs}
    (listed,) = await probe.call("ListRuns", pb.ListRunsRequest())
    names = {run.run_id for run in listed.runs}
    must(names == told, f"ListRuns lists {sorted(names)}, GetTrainer tells {sorted(told)}")


@checks("trainer.revisions")
async def _revisions(probe: Probe) -> None:
    run = (await _trainer(probe)).runs[0]
    if run.revision < 2:
        raise NotCheckedError("the run has no history yet; watch it after its first step, or with --full")
    after = max(0, run.revision - 100)
    request = pb.WatchStepsRequest(run_id=run.run_id, after_revision=after)
    # Up to the newest that the run tells.
    events = await probe.call("WatchSteps", request, until=lambda events: events[-1].revision >= run.revision)
    revisions = [event.revision for event in events]
    wanted = list(range(after + 1, after + 1 + len(revisions)))
    must(revisions == wanted, f"after revision {after} come {revisions[:8]}")


@checks("trainer.bookmarks")
async def _bookmarks(probe: Probe) -> None:
    run = (await _trainer(probe)).runs[0]
    first, *_ = await bookmarks(probe, "WatchSteps", pb.WatchStepsRequest(run_id=run.run_id))
    must(first.revision >= run.revision, f"from now on begins at {first.revision}, the run was at {run.revision}")


@checks("trainer.expired")
async def _expired(probe: Probe) -> None:
    run = (await _trainer(probe)).runs[0]
    request = pb.WatchStepsRequest(run_id=run.run_id, after_revision=FAR_VERSION)
    refusal = await probe.refused("WatchSteps", request, reason=Reason.REVISION_EXPIRED)
    await since_1_1(probe)
    oldest = dict(refusal.info.metadata).get("oldest_revision", "") if refusal.info is not None else ""
    must(oldest.isdigit(), f"the error's metadata oldest_revision is {oldest!r}")
    request = pb.WatchStepsRequest(run_id=run.run_id, after_revision=int(oldest), bookmark_s=BOOKMARK_S)
    (event,) = await probe.call("WatchSteps", request, until=lambda messages: True)
    begins = event.revision == int(oldest) if event.bookmark else event.revision == int(oldest) + 1
    must(begins, f"after revision {oldest}, which is the oldest, comes {event.revision}")


@checks("trainer.unknown-run")
async def _unknown_run(probe: Probe) -> None:
    await probe.refused("WatchSteps", pb.WatchStepsRequest(run_id=NOWHERE), reason=Reason.UNKNOWN_RUN)
    request = pb.DeleteRunRequest(request_id=str(uuid.uuid4()), run_id=NOWHERE)
    await probe.refused("DeleteRun", request, reason=Reason.UNKNOWN_RUN)


@checks("trainer.header")
async def _header(probe: Probe) -> None:
    trainer = await _trainer(probe)
    _, row, *_ = batch_to_messages(_batch(trainer, trainer.runs[0].step + FAR_STEPS))
    await probe.refused("SubmitBatch", row, reason=Reason.INVALID_REQUEST)


@checks("trainer.next-step")
async def _next_step(probe: Probe) -> None:
    trainer = await _trainer(probe)
    messages = batch_to_messages(_batch(trainer, trainer.runs[0].step + FAR_STEPS))
    await probe.refused("SubmitBatch", *messages, reason=Reason.STEP_OUT_OF_ORDER)


@checks("trainer.digest")
async def _digest(probe: Probe) -> None:
    trainer = await _trainer(probe)
    header, *rows = batch_to_messages(_batch(trainer, trainer.runs[0].step + 1))
    header.header.digest = "0" * 64
    await probe.refused("SubmitBatch", header, *rows, reason=Reason.BATCH_DIGEST_MISMATCH)


@checks("trainer.rows")
async def _rows(probe: Probe) -> None:
    trainer = await _trainer(probe)
    if not trainer.vocab_size:
        raise NotCheckedError("the trainer does not return its vocab_size")
    messages = batch_to_messages(_batch(trainer, trainer.runs[0].step + 1, token=trainer.vocab_size))
    await probe.invalid("SubmitBatch", *messages, fields=["micro_batches[0].token_ids"])


async def _trained(probe: Probe) -> tuple[list[Any], Any, Sequence[Any]]:
    """Trained once for all checks: upload, answer and events."""
    if "trained" not in probe.memory:
        trainer = await _trainer(probe)
        run = trainer.runs[0]
        upload = list(batch_to_messages(_batch(trainer, run.step + 1)))
        (answer,) = await probe.call("SubmitBatch", *upload)
        request = pb.WatchStepsRequest(run_id=run.run_id, after_revision=run.revision)
        over = (pb.STEP_STATE_DONE, pb.STEP_STATE_FAILED)
        events = await probe.call("WatchSteps", request, until=lambda events: events[-1].state in over)
        probe.memory["trained"] = upload, answer, events
    found: tuple[list[Any], Any, Sequence[Any]] = probe.memory["trained"]
    return found


@checks("trainer.step")
async def _step(probe: Probe) -> None:
    upload, answer, events = await _trained(probe)
    step = upload[0].header.step
    states = [pb.StepState.Name(event.state).removeprefix("STEP_STATE_") for event in events if event.step == step]
    must(states == ["QUEUED", "RUNNING", "DONE"], f"step {step} went through {', '.join(states)}: {events[-1].message}")
    must(events[-1].version == step, f"step {step} made version {events[-1].version}")
    queued = events[0].revision
    must(answer.revision == queued, f"SubmitBatch says QUEUED is revision {answer.revision}, WatchSteps {queued}")
    revisions = [event.revision for event in events]
    must(revisions == list(range(queued, queued + len(events))), f"the revisions of a step are {revisions}")


@checks("trainer.repeat")
async def _repeat(probe: Probe) -> None:
    upload, answer, _ = await _trained(probe)
    (again,) = await probe.call("SubmitBatch", *upload)
    must(again == answer, f"the same batch again is answered {again}, at first {answer}")


@checks("trainer.conflict")
async def _conflict(probe: Probe) -> None:
    upload, _, _ = await _trained(probe)
    other = _batch(await _trainer(probe), upload[0].header.step, token=0)
    await probe.refused("SubmitBatch", *batch_to_messages(other), reason=Reason.BATCH_CONFLICT)


@checks("trainer.save")
async def _save(probe: Probe) -> None:
    request = pb.SaveCheckpointRequest(request_id=str(uuid.uuid4()))
    (first,) = await probe.call("SaveCheckpoint", request)
    (again,) = await probe.call("SaveCheckpoint", request)
    must(again == first, f"the same request again saves {again.path}, at first {first.path}")
    request.weights_only = True
    await probe.refused("SaveCheckpoint", request, reason=Reason.DUPLICATE_REQUEST)


@checks("trainer.checkpoints")
async def _checkpoints(probe: Probe) -> None:
    (answer,) = await probe.call("GetTrainer", pb.GetTrainerRequest())
    if capabilities.CHECKPOINTS not in answer.capabilities:
        raise NotCheckedError(f"the server does not list the capability {capabilities.CHECKPOINTS}")
    request = pb.SaveCheckpointRequest(request_id=str(uuid.uuid4()), name="conformance", return_at_once=True)
    (begun,) = await probe.call("SaveCheckpoint", request)
    must(begun.checkpoint.request_id == request.request_id, "the answer has no checkpoint of the request")
    end_s = time.monotonic() + probe.deadline_s
    while True:
        found = [one for one in await _listed(probe, page_size=1) if one.request_id == request.request_id]
        must(len(found) == 1, f"ListCheckpoints lists the checkpoint of a request {len(found)} times")
        if found[0].state != pb.CHECKPOINT_STATE_SAVING:
            break
        must(time.monotonic() < end_s, f"the checkpoint is still being saved after {probe.deadline_s:g} s")
        await asyncio.sleep(LOOK_S)
    state = pb.CheckpointState.Name(found[0].state)
    must(found[0].state == pb.CHECKPOINT_STATE_DURABLE, f"the checkpoint is {state}: {found[0].message}")
    must(bool(found[0].path) and found[0].name == "conformance", "the checkpoint has no path, or another name")
    whole = await _listed(probe, page_size=0)
    must(await _listed(probe, page_size=1) == whole, "pages of ListCheckpoints list others than one answer")
    steps = [one.step for one in whole]
    must(steps == sorted(steps, reverse=True), f"the steps of ListCheckpoints are {steps}, not newest first")


async def _listed(probe: Probe, *, page_size: int) -> list[Any]:
    found: list[Any] = []
    request = pb.ListCheckpointsRequest(page_size=page_size)
    while True:
        (page,) = await probe.call("ListCheckpoints", request)
        over = page_size and len(page.checkpoints) > page_size
        must(not over, f"a page of {page_size} checkpoints has {len(page.checkpoints)}")
        found += page.checkpoints
        if not page.next_page_token:
            return found
        must(page.next_page_token != request.page_token, "a page of ListCheckpoints leads to itself")
        request.page_token = page.next_page_token


@checks("trainer.own-run")
async def _own_run(probe: Probe) -> None:
    own = (await _trainer(probe)).runs[0].run_id
    request = pb.DeleteRunRequest(request_id=str(uuid.uuid4()), run_id=own)
    await probe.refused("DeleteRun", request, reason=Reason.RUN_PROTECTED)
