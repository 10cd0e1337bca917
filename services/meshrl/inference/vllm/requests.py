"""Converts requests to vLLM's, and vLLM's outputs to `TokenChunk`s: whole completions, or pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams as VllmSamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from meshrl.inference.engine import FinishReason, GenerateRequest, PromptLogprobs, RequestTimes, TokenChunk
from meshrl.inference.vllm.version_clock import CompletionRecord, VersionClock
from meshrl.inference.vllm.whole_completions import RECORD_KEY, WHOLE_KEY
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types.routes import Routes, narrowed

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs


@dataclass(frozen=True, kw_only=True)
class RoutedLayers:
    layers: tuple[int, ...]
    experts: int


_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class RequestCodec:
    def __init__(
        self, clock: VersionClock, *, eos_token_ids: tuple[int, ...], routed: RoutedLayers | None = None
    ) -> None:
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self.routed = routed
        self.queued = self.preempted = 0
        """Requests that waited for room at the end of the last one, and requests preempted since the start."""

    def params(self, request: GenerateRequest, room: int) -> VllmSamplingParams:
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return VllmSamplingParams(
            max_tokens=room,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            min_tokens=min(sampling.min_tokens, room),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            stop_token_ids=list(dict.fromkeys((*sampling.stop_token_ids, *eos))),
            ignore_eos=True,  # the end tokens are among the stop tokens
            seed=None if sampling.seed is None else sampling.seed % 2**63,
            logprobs=sampling.top_logprobs if sampling.logprobs else None,
            prompt_logprobs=sampling.prompt_logprobs,
            detokenize=False,
            flat_logprobs=True,
            skip_clone=True,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            extra_args=None if request.stream else {WHOLE_KEY: True},
            **self._routes_from(request),
        )

    def _routes_from(self, request: GenerateRequest) -> dict[str, int]:
        if self.routed is None:
            return {}
        start, last = request.sampling.routed_experts_prompt_start, len(request.prompt_ids) - 1
        return {"routed_experts_prompt_start": last if start is None else min(start, last)}

    def chunk(self, request: GenerateRequest, output: RequestOutput, start: int) -> TokenChunk:
        """A piece of a streamed completion from token `start` on, or a whole one. Raises MeshError ENGINE_FAILED for
        logprobs that are not finite."""
        completion, sampling = output.outputs[0], request.sampling
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        record: CompletionRecord | None = (output.kv_transfer_params or {}).get(RECORD_KEY)
        if record is not None and "queue" in record:
            self.queued, preempted = record["queue"]
            self.preempted += preempted
        count = len(token_ids)
        logprobs, top_ids, top_logprobs = _from_record(record, count, sampling.top_logprobs)
        if logprobs is None:
            logprobs, top_ids, top_logprobs = _from_flat(completion.logprobs, count, sampling.top_logprobs)
        if sampling.logprobs and not np.isfinite(logprobs).all():
            raise MeshError(Reason.ENGINE_FAILED, "the model produced logits that are not finite; apply other weights")
        finish, stop = completion.finish_reason, completion.stop_reason
        return TokenChunk(
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            raw_logprobs=logprobs if sampling.raw_logprobs else None,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            version_spans=self._clock.spans(record, start + count) if record is not None else (),
            finish_reason=None if finish is None else _FINISH.get(finish, FinishReason.ABORT),
            stop_token_id=stop if isinstance(stop, int) else None,
            prompt_logprobs=_prompt_logprobs(output, request),
            routed_experts=self._routes(request, completion.routed_experts, start + count),
            times=_times(record),
        )

    def _routes(self, request: GenerateRequest, found: NDArray[np.generic] | None, made: int) -> Routes | None:
        """(N, L, K): vLLM's have a row for each layer, also without experts."""
        first = request.sampling.routed_experts_prompt_start
        if self.routed is None or found is None or first is None:
            return None
        rows = max(0, len(request.prompt_ids) + made - 1 - first)
        layers = found[len(found) - rows :, list(self.routed.layers)]
        return narrowed(layers.astype(np.int64), self.routed.experts)


def _times(record: CompletionRecord | None) -> RequestTimes | None:
    if record is None or "times" not in record:
        return None
    queue_s, prefill_s, decode_s = record["times"]
    return RequestTimes(queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s)


def _from_record(
    record: CompletionRecord | None, count: int, alternatives: int
) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """(T,) logprobs and (T, K) alternatives of a whole completion."""
    if record is None or "logprobs" not in record:
        return None, None, None
    logprobs = np.frombuffer(record["logprobs"], dtype="<f4")[:count]
    if not alternatives:
        return logprobs, None, None
    shape = (count, alternatives)
    return (
        logprobs,
        np.frombuffer(record["top_ids"], dtype="<i4").reshape(shape),
        np.frombuffer(record["top_logprobs"], dtype="<f4").reshape(shape),
    )


def _from_flat(
    flat: FlatLogprobs | None, count: int, alternatives: int
) -> tuple[NDArray[np.float32], NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """The same from vLLM's FlatLogprobs, as streams have them; NaN if none were asked for.

    A place has the sampled token and then the alternatives. If vLLM has joined pieces of a stream, a sampled token that
    is among the alternatives is there once.
    """
    if not flat:
        return np.full(count, np.nan, dtype=np.float32), None, None
    starts = np.asarray(flat.start_indices[:count], dtype=np.int64)
    values, ids = np.asarray(flat.logprobs, dtype=np.float32), np.asarray(flat.token_ids, dtype=np.int32)
    if not alternatives:
        return values[starts], None, None
    ends = np.asarray(flat.end_indices[:count], dtype=np.int64)
    columns = starts[:, None] + 1 + np.arange(alternatives)
    for place in np.flatnonzero(ends - starts != alternatives + 1):
        found = range(starts[place], ends[place])
        columns[place] = sorted(found, key=lambda entry: flat.ranks[entry] or 0)[:alternatives]
    return values[starts], ids[columns], values[columns]


def _prompt_logprobs(output: RequestOutput, request: GenerateRequest) -> PromptLogprobs | None:
    flat: FlatLogprobs | None = output.prompt_logprobs
    if (asked := request.sampling.prompt_logprobs) is None or not flat:
        return None
    starts = np.asarray(flat.start_indices, dtype=np.int64)
    values = np.asarray(flat.logprobs, dtype=np.float32)
    found = np.full(len(request.prompt_ids), np.nan, dtype=np.float32)
    known = starts < np.asarray(flat.end_indices, dtype=np.int64)
    found[known] = values[starts[known]]
    if asked < 2:
        return PromptLogprobs(logprobs=found)
    ids = np.asarray(flat.token_ids, dtype=np.int32)
    columns = starts[known][:, None] + 1 + np.arange(asked)
    top_ids = np.zeros((len(found), asked), dtype=np.int32)
    top_logprobs = np.zeros((len(found), asked), dtype=np.float32)
    top_ids[known], top_logprobs[known] = ids[columns], values[columns]
    return PromptLogprobs(logprobs=found, top_ids=top_ids, top_logprobs=top_logprobs)
