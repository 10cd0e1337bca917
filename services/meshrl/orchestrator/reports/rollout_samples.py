"""Writes the rollouts of each step that are worth reading to `rollouts/step_N.jsonl.zst` of the output folder.

Read by `meshrl rollouts`. A line is one whole rollout: its messages, its rewards, and every token with its logprob,
mask and version. `RolloutSamplesConfig` chooses among trained and dropped ones; every failed one is there. Those that
trained also have the trainer's logprobs, which the batch requests.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import zstandard
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.config.schema import flag
from meshrl.core.durable import write_file
from meshrl.orchestrator.config import RolloutSamplesConfig
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.wire.saved_steps import step_files
from meshrl.wire.trace import parse_traceparent
from meshrl.wire.types import MicroBatch, Rollout, Sample

_Line = Mapping[str, object]
Logprobs = Mapping[str, NDArray[np.float32]]
"""The trainer's, by rollout id: one for each token of the rl term, in the order of the batch's rows."""


class RolloutSamplesWriter:
    """A disk that takes none of it is warned about once; the run goes on."""

    def __init__(self, config: RolloutSamplesConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._warned = False

    def set_aside_after(self, step: int) -> None:
        """Renames the files of later steps, which are of an earlier run in the folder or were undone."""
        for number, path in step_files(self._folder, ".jsonl.zst").items():
            if number > step:
                path.replace(path.with_name(f"superseded_{path.name}"))

    def request_logprobs(self, step: SubmittedStep) -> SubmittedStep:
        if step.step % self._config.interval:
            return step
        trained = step.assembled.advantages.keys() - step.assembled.untrainable
        ids = [rollout.rollout_id for _, rollout in picked(step, self._config) if rollout.rollout_id in trained]
        batch = replace(step.assembled.batch, logprob_rollouts=tuple(ids))
        return replace(step, assembled=replace(step.assembled, batch=batch))

    def write(self, step: SubmittedStep, logprobs: Logprobs) -> None:
        """With the trainer's logprobs (StepEvent.logprobs), if any. Blocks. Raises nothing of the disk's."""
        if step.step % self._config.interval:
            return
        lines = within(chosen(step, self._config, logprobs), round(self._config.max_mib * 2**20))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            packed = zstandard.ZstdCompressor(level=3).compress(b"".join(lines))
            write_file(self._folder / f"step_{step.step}.jsonl.zst", packed)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "no rollouts are kept to be read: {}; free the disk, or set {}",
                    error,
                    flag("rollout_samples", off=True),
                )


def within(lines: Iterable[_Line], max_bytes: int) -> Iterator[bytes]:
    """As JSON, without those that do not fit; shorter ones may follow."""
    for line in lines:
        written = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        if len(written) <= max_bytes:
            max_bytes -= len(written)
            yield written


def chosen(step: SubmittedStep, config: RolloutSamplesConfig, logprobs: Logprobs) -> Iterator[_Line]:
    """The lines of a step, the most valuable first."""
    for group in step.judged:
        for failure in group.failures:
            yield {
                "picked": "failed", "step": step.step, "rollout_id": failure.rollout_id, "group_id": failure.group_id,
                "environment": group.ticket.task.environment, "task_index": group.ticket.task.index,
                "reason": failure.reason, "message": failure.message,
            }  # fmt: skip
    for why, rollout in picked(step, config):
        advantage = step.assembled.advantages.get(rollout.rollout_id)
        found = trainer_logprobs(rollout, step.assembled.batch.micro_batches, logprobs.get(rollout.rollout_id))
        yield {"picked": why, "step": step.step, "advantage": advantage, **_line(rollout, found)}


def picked(step: SubmittedStep, config: RolloutSamplesConfig) -> Iterator[tuple[str, Rollout]]:
    """With their reason; the same at each call."""
    by_environment: dict[str, list[Rollout]] = defaultdict(list)
    for group in step.judged:
        for rollout in group.rollouts:
            by_environment[rollout.environment].append(rollout)
    for why in ("worst", "best", "random"):
        for rollouts in by_environment.values():
            yield from ((why, rollout) for rollout in _taken(rollouts, why, getattr(config, why), seed=step.step))


def trainer_logprobs(
    rollout: Rollout, rows: Sequence[MicroBatch], values_N: NDArray[np.float32] | None
) -> list[NDArray[np.float32]] | None:
    """(T,) of each sample, NaN outside the rl term; None if the trainer gave nothing, or not one value a token."""
    places = [
        (row, place) for row in rows for place, owner in enumerate(row.rollout_ids) if owner == rollout.rollout_id
    ]
    masks = [row.loss_mask[row.sample_offsets[place] : row.sample_offsets[place + 1]] for row, place in places]
    if values_N is None or len(values_N) != sum(int(mask.sum()) for mask in masks):
        return None
    found = [np.full(len(sample.token_ids), np.nan, dtype=np.float32) for sample in rollout.samples]
    left = list(range(len(found)))
    for (row, place), mask in zip(places, masks, strict=True):
        own = row.token_ids[row.sample_offsets[place] : row.sample_offsets[place + 1]]
        prefix = 0 if row.prefix_tokens is None else int(row.prefix_tokens[place])
        values, values_N = np.split(values_N, [int(mask.sum())])
        for index in left:  # rows are packed in an order of their own
            if np.array_equal(rollout.samples[index].token_ids[prefix : prefix + len(own)], own):
                found[index][prefix + np.flatnonzero(mask)] = values
                left.remove(index)
                break
    return found


def _taken(rollouts: list[Rollout], picked: str, number: int, *, seed: int) -> list[Rollout]:
    if picked == "random":
        taken = random.Random(seed).sample(rollouts, min(number, len(rollouts)))
    else:
        taken = sorted(rollouts, key=_rank, reverse=picked == "best")[:number]
    of_taken = {id(rollout) for rollout in taken}
    rollouts[:] = [rollout for rollout in rollouts if id(rollout) not in of_taken]
    return taken


def _rank(rollout: Rollout) -> float:
    return rollout.reward if math.isfinite(rollout.reward) else -math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(rollout: Rollout, logprobs: Sequence[NDArray[np.float32]] | None) -> _Line:
    context = parse_traceparent(rollout.traceparent)
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "environment": rollout.environment,
        "task_key": rollout.task_key,
        "agent": rollout.agent,
        "reward": _finite(rollout.reward),
        "reward_parts": {name: _finite(value) for name, value in rollout.reward_parts.items()},
        "metrics": {name: _finite(value) for name, value in rollout.metrics.items()},
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "num_turns": rollout.num_turns,
        "timings_s": {name: round(seconds, 4) for name, seconds in rollout.timings_s.items()},
        "trace_id": None if context is None else f"{context.trace_id:032x}",
        "samples": [
            _sample(sample, None if logprobs is None else logprobs[place])
            for place, sample in enumerate(rollout.samples)
        ],
    }


def _sample(sample: Sample, trainer_logprobs_T: NDArray[np.float32] | None) -> dict[str, object]:
    """`logprobs` is null for tokens that were not sampled."""
    pairs = zip(sample.logprobs.tolist(), sample.loss_mask.tolist(), strict=True)
    told: dict[str, object] = {
        "token_ids": sample.token_ids.tolist(),
        "logprobs": [round(logprob, 5) if sampled else None for logprob, sampled in pairs],
        "temperature": sample.temperature,
        "versions": [[span.start, span.end, span.version] for span in sample.version_spans],
        "messages": [
            {"role": span.role, "text": span.text, "tokens": [span.start, span.end]} for span in sample.message_spans
        ],
    }
    if trainer_logprobs_T is not None:
        told["trainer_logprobs"] = [_finite(round(logprob, 5)) for logprob in trainer_logprobs_T.tolist()]
    return told
