"""Messages of RolloutService to dataclasses and back. T is the number of tokens of a sample."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.convert.fields import FieldReader, optional
from meshrl.wire.types import (
    EngineEndpoint,
    EnvironmentInfo,
    MessageSpan,
    Rollout,
    RolloutEvent,
    RolloutFailure,
    RolloutRequest,
    RolloutStatus,
    RolloutSummary,
    Sample,
    Sampling,
    VersionSpan,
)


def sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
    )


def _decimal(value: float | None) -> float | None:
    """Undoes the widening of a float32 field: 0.9 comes back as 0.9, not as 0.8999999761581421."""
    return None if value is None or not math.isfinite(value) else float(str(np.float32(value)))


def sampling_from_proto(message: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=_decimal(optional(message, "temperature")),
        top_p=_decimal(optional(message, "top_p")),
        top_k=optional(message, "top_k"),
        min_p=_decimal(optional(message, "min_p")),
        max_tokens=optional(message, "max_tokens"),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=optional(message, "seed"),
    )


def environment_to_proto(environment: EnvironmentInfo) -> pb.Environment:
    return pb.Environment(
        name=environment.name,
        taskset=environment.taskset,
        num_tasks=environment.num_tasks,
        agents=environment.agents,
        default_sampling=sampling_to_proto(environment.default_sampling),
        package_version=environment.package_version,
    )


def environment_from_proto(message: pb.Environment) -> EnvironmentInfo:
    return EnvironmentInfo(
        name=message.name,
        taskset=message.taskset,
        num_tasks=optional(message, "num_tasks"),
        agents=tuple(message.agents),
        default_sampling=sampling_from_proto(message.default_sampling),
        package_version=message.package_version,
    )


def rollout_request_to_proto(request: RolloutRequest) -> pb.RunRolloutsRequest:
    return pb.RunRolloutsRequest(
        request_id=request.request_id,
        group_id=request.group_id,
        environment=request.environment,
        task_index=request.task_index,
        task_payload=request.task_payload,
        group_size=request.group_size,
        sampling=sampling_to_proto(request.sampling),
        engine_pool=request.engine_pool,
        min_version=request.min_version,
        exact_version=request.exact_version,
        deadline_s=request.deadline_s,
        traceparent=request.traceparent,
        scores_only=request.scores_only,
        conversations=request.conversations,
    )


def rollout_request_from_proto(message: pb.RunRolloutsRequest) -> RolloutRequest:
    """Returns the request as it came; `validate.validate_rollout_request` says whether it makes sense."""
    return RolloutRequest(
        request_id=message.request_id,
        group_id=message.group_id,
        environment=message.environment,
        task_index=optional(message, "task_index"),
        task_payload=optional(message, "task_payload"),
        group_size=message.group_size,
        sampling=sampling_from_proto(message.sampling),
        engine_pool=message.engine_pool,
        min_version=optional(message, "min_version"),
        exact_version=optional(message, "exact_version"),
        deadline_s=message.deadline_s,
        traceparent=message.traceparent,
        scores_only=message.scores_only,
        conversations=message.conversations,
    )


def sample_to_proto(sample: Sample) -> pb.Sample:
    return pb.Sample(
        token_ids=tensors.encode(sample.token_ids),
        loss_mask=tensors.encode(sample.loss_mask),
        logprobs=tensors.encode(sample.logprobs),
        version_spans=[
            pb.VersionSpan(start=s.start, end=s.end, version=s.version, prompt_version=s.prompt_version)
            for s in sample.version_spans
        ],
        message_spans=[
            pb.MessageSpan(
                start=s.start,
                end=s.end,
                role=s.role,
                text=s.text,
                content_start=s.content_start,
                content_end=s.content_end,
            )
            for s in sample.message_spans
        ],
        temperature=sample.temperature,
    )


def sample_from_proto(message: pb.Sample, field: str = "") -> Sample:
    """Returns the sample; raises INVALID_REQUEST if lengths differ or a sampled token has no version."""
    reader = FieldReader("the sample", field)
    token_ids_T = reader.vector(message.token_ids, "token_ids", "int32")
    loss_mask_T = reader.vector(message.loss_mask, "loss_mask", "bool")
    logprobs_T = reader.vector(message.logprobs, "logprobs", "float32")
    if reader.ok:
        reader.length(loss_mask_T, "loss_mask", len(token_ids_T), "token_ids")
        reader.length(logprobs_T, "logprobs", len(token_ids_T), "token_ids")
    spans = tuple(
        VersionSpan(
            start=s.start, end=s.end, version=s.version,
            prompt_version=s.prompt_version if s.HasField("prompt_version") else None,
        )
        for s in message.version_spans
    )  # fmt: skip
    messages = tuple(
        MessageSpan(
            start=s.start, end=s.end, role=s.role, text=s.text,
            content_start=optional(s, "content_start"), content_end=optional(s, "content_end"),
        )
        for s in message.message_spans
    )  # fmt: skip
    if reader.ok:
        _check_version_spans(reader, spans, loss_mask_T)
    for place, span in enumerate(messages):
        _check_content(reader, span, f"message_spans[{place}]")
    reader.done()
    return Sample(
        token_ids=token_ids_T,
        loss_mask=loss_mask_T,
        logprobs=logprobs_T,
        version_spans=spans,
        message_spans=messages,
        temperature=_decimal(message.temperature) or 0.0,
    )


def _check_version_spans(reader: FieldReader, spans: tuple[VersionSpan, ...], loss_mask_T: NDArray[np.bool_]) -> None:
    covered_T = np.zeros(len(loss_mask_T), dtype=np.bool_)
    last_end = 0
    for span in spans:
        if not last_end <= span.start < span.end <= len(loss_mask_T):
            reader.check(False, "version_spans", f"[{span.start}, {span.end}) overlaps, is empty or passes the end")
            return
        covered_T[span.start : span.end] = True
        last_end = span.end
    covered = not spans or not bool((loss_mask_T & ~covered_T).any())
    reader.check(covered, "version_spans", "must cover every token of loss_mask, or be none at all")


def _check_content(reader: FieldReader, span: MessageSpan, field: str) -> None:
    start, end = span.content_start, span.content_end
    if start is None or end is None:
        reader.check(start is end, field, "needs content_start and content_end, or neither")
    else:
        within = span.start <= start <= end <= span.end
        reader.check(within, field, f"content [{start}, {end}) is not within the message [{span.start}, {span.end})")


def rollout_to_proto(rollout: Rollout) -> pb.Rollout:
    return pb.Rollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        task_key=rollout.task_key,
        environment=rollout.environment,
        agent=rollout.agent,
        samples=[sample_to_proto(sample) for sample in rollout.samples],
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        metrics=rollout.metrics,
        finish_reason=rollout.finish_reason,
        truncated=rollout.truncated,
        num_turns=rollout.num_turns,
        timings_s=rollout.timings_s,
        traceparent=rollout.traceparent,
        completion=rollout.completion,
        episode_id=rollout.episode_id,
        conversations=rollout.conversations,
    )


def rollout_from_proto(message: pb.Rollout) -> Rollout:
    return Rollout(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        task_key=message.task_key,
        environment=message.environment,
        agent=message.agent,
        samples=tuple(sample_from_proto(sample, f"samples[{i}]") for i, sample in enumerate(message.samples)),
        reward=message.reward,
        reward_parts=dict(message.reward_parts),
        metrics=dict(message.metrics),
        finish_reason=message.finish_reason,
        truncated=message.truncated,
        num_turns=message.num_turns,
        timings_s=dict(message.timings_s),
        traceparent=message.traceparent,
        completion=message.completion,
        episode_id=message.episode_id,
        conversations=tuple(message.conversations),
    )


def rollout_failure_to_proto(failure: RolloutFailure) -> pb.RolloutFailure:
    return pb.RolloutFailure(
        rollout_id=failure.rollout_id,
        group_id=failure.group_id,
        reason=failure.reason,
        message=failure.message,
        retryable=failure.retryable,
        traceparent=failure.traceparent,
    )


def rollout_failure_from_proto(message: pb.RolloutFailure) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        reason=message.reason,
        message=message.message,
        retryable=message.retryable,
        traceparent=message.traceparent,
    )


def rollout_summary_to_proto(summary: RolloutSummary) -> pb.RolloutSummary:
    return pb.RolloutSummary(
        finished=summary.finished,
        failed=summary.failed,
        cancelled=summary.cancelled,
        sampled_tokens=summary.sampled_tokens,
    )


def rollout_summary_from_proto(message: pb.RolloutSummary) -> RolloutSummary:
    return RolloutSummary(
        finished=message.finished,
        failed=message.failed,
        cancelled=message.cancelled,
        sampled_tokens=message.sampled_tokens,
    )


def rollout_event_to_proto(event: RolloutEvent) -> pb.RunRolloutsResponse:
    if isinstance(event, Rollout):
        return pb.RunRolloutsResponse(rollout=rollout_to_proto(event))
    if isinstance(event, RolloutFailure):
        return pb.RunRolloutsResponse(failure=rollout_failure_to_proto(event))
    return pb.RunRolloutsResponse(summary=rollout_summary_to_proto(event))


def rollout_event_from_proto(message: pb.RunRolloutsResponse) -> RolloutEvent | None:
    """Returns the event, or None for one of a kind that this program does not know."""
    kind = message.WhichOneof("event")
    if kind == "rollout":
        return rollout_from_proto(message.rollout)
    if kind == "failure":
        return rollout_failure_from_proto(message.failure)
    return rollout_summary_from_proto(message.summary) if kind == "summary" else None


def engine_endpoint_to_proto(engine: EngineEndpoint) -> pb.EngineEndpoint:
    return pb.EngineEndpoint(
        url=engine.url,
        healthy=engine.healthy,
        version=engine.version,
        in_flight=engine.in_flight,
        logprobs_mode=engine.logprobs_mode,
        slots=engine.slots,
        kv_tokens=engine.kv_tokens,
    )


def engine_endpoint_from_proto(message: pb.EngineEndpoint) -> EngineEndpoint:
    return EngineEndpoint(
        url=message.url,
        healthy=message.healthy,
        version=optional(message, "version"),
        in_flight=message.in_flight,
        logprobs_mode=message.logprobs_mode,
        slots=optional(message, "slots"),
        kv_tokens=optional(message, "kv_tokens"),
    )


def rollout_status_to_proto(status: RolloutStatus) -> pb.GetRolloutStatusResponse:
    return pb.GetRolloutStatusResponse(
        running=status.running,
        queued=status.queued,
        finished=status.finished,
        failures=status.failures,
        rollouts_per_s=status.rollouts_per_s,
        engines=[engine_endpoint_to_proto(engine) for engine in status.engines],
        draining=status.draining,
        max_concurrent=status.max_concurrent,
        limit_reason=status.limit_reason,
    )


def rollout_status_from_proto(message: pb.GetRolloutStatusResponse) -> RolloutStatus:
    return RolloutStatus(
        running=message.running,
        queued=message.queued,
        finished=message.finished,
        failures=dict(message.failures),
        rollouts_per_s=message.rollouts_per_s,
        engines=tuple(engine_endpoint_from_proto(engine) for engine in message.engines),
        draining=message.draining,
        max_concurrent=message.max_concurrent,
        limit_reason=message.limit_reason,
    )
