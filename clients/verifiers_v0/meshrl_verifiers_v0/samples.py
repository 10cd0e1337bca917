"""Turns a scored state of verifiers 0.1 into the rollout of the contract. Shapes: T tokens of a sample."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutRequest, Sample, VersionSpan

Spans = list[tuple[int, int, int]]
"""(start, end, version) over the tokens of one completion."""


@dataclass
class Sampled:
    """The fields of a completion that the wire needs and verifiers does not keep."""

    spans: Spans
    prompt_version: int | None = None


@dataclass
class Calls:
    """A rollout's completions by their id, and why a call failed."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    failure: MeshError | None = None


@dataclass
class OpenSample:
    """A sample that further turns may extend."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def extended_by(self, prompt_ids: Sequence[int]) -> bool:
        return list(prompt_ids[: len(self.ids)]) == self.ids

    def add(self, tokens: Mapping[str, Any], sampled: Sampled) -> None:
        context = tokens["prompt_ids"][len(self.ids) :]
        completion = tokens["completion_ids"]
        start = len(self.ids) + len(context)
        self.ids += [*context, *completion]
        self.mask += [False] * len(context) + [True] * len(completion)
        self.logprobs += [0.0] * len(context) + list(tokens["completion_logprobs"])
        for number, (begin, end, version) in enumerate(sampled.spans):
            end = min(end, len(completion))  # verifiers cuts what exceeds its max_seq_len
            if begin < end:
                older = sampled.prompt_version if number == 0 and sampled.prompt_version != version else None
                self.spans.append(
                    VersionSpan(start=start + begin, end=start + end, version=version, prompt_version=older)
                )

    def finished(self, temperature: float) -> Sample:
        return Sample(
            token_ids=np.asarray(self.ids, dtype=np.int32),
            loss_mask=np.asarray(self.mask, dtype=np.bool_),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            version_spans=tuple(self.spans),
            temperature=temperature,
        )


def samples_of(steps: Sequence[Mapping[str, Any]], calls: Calls, temperature: float) -> tuple[Sample, ...]:
    """One for each run of turns in which each prompt continues the tokens of the turn before."""
    made: list[OpenSample] = []
    for step in steps:
        tokens = step["tokens"]
        if tokens is None or not tokens["completion_ids"]:
            continue
        if not made or not made[-1].extended_by(tokens["prompt_ids"]):
            made.append(OpenSample())
        made[-1].add(tokens, calls.sampled[step["response"].id])
    return tuple(sample.finished(temperature) for sample in made)


def rollout_of(
    state: Mapping[str, Any], calls: Calls, request: RolloutRequest, *, key: str, temperature: float
) -> Rollout:
    """Raises MeshError for a state without a rollout."""
    if calls.failure is not None:
        raise calls.failure
    if state.get("error") is not None:
        error = state["error"]
        raise MeshError(Reason.ENVIRONMENT_FAILED, f"{type(error).__name__}: {error}")
    reward = state.get("reward")
    if reward is None or not abs(reward) <= np.finfo(np.float32).max:  # nor is NaN
        raise MeshError(Reason.ENVIRONMENT_FAILED, f"the reward is not a finite number of single precision: {reward}")
    steps = state["trajectory"]
    last = steps[-1]["response"].message if steps else None
    timing = state["timing"]
    return Rollout(
        rollout_id=str(uuid.uuid4()),
        group_id=request.group_id,
        task_key=key,
        environment=request.environment,
        samples=samples_of(steps, calls, temperature),
        reward=float(reward),
        metrics={name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None},
        finish_reason=(last.finish_reason if last is not None else None) or state.get("stop_condition") or "",
        truncated=bool(state.get("is_truncated")),
        num_turns=len(steps),
        timings_s={"scoring": max(0.0, timing.scoring.end - timing.scoring.start)},
        traceparent=request.traceparent,
        completion=str(last.content or "") if last is not None else "",
    )
