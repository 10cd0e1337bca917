"""vLLM's schedulers, with completions handed over whole: runs in vLLM's engine process, named by `scheduler_cls`.

vLLM sends each token to the front end at once, with small arrays of logprobs. Here a request that wants its answer in
one piece leaves in one message. The scheduler also notes at how many tokens generation was resumed after a pause, where
one weight version ends and the next begins.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from meshrl.core.orphans import end_with_parent
from meshrl.inference.vllm.installed import replace
from meshrl.inference.vllm.version_clock import CompletionRecord

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

RECORD_KEY = "meshrl"
"""Of the record, in `kv_transfer_params`, the one field of an output that vLLM passes through untouched."""

WHOLE_KEY = "meshrl_whole"
"""In SamplingParams.extra_args of requests that want their answer in one piece."""

AHEAD = -1
"""Goes ahead of all that wait, whatever vLLM's scheduling policy."""

PROBE_SEATS = 1
"""Sequences beyond the configured ones, so that a version can be probed while all of these are busy."""


@dataclass(kw_only=True, slots=True)
class UnfinishedRequest:
    whole: bool
    alternatives: int  # K
    first_pause: int  # pauses before it came
    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: int = 0
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    rows: list[LogprobsLists] = field(default_factory=list)  # K > 0: (T, 1 + K) each
    experts: list[NDArray[np.integer]] = field(default_factory=list)  # routed experts, (T, layers, experts) each
    prompt_pause: int | None = None  # pauses before the one that the prompt was computed before, if there was one
    resumed_at: list[int] = field(default_factory=list)  # tokens when a pause ended, one for each since it came
    prefill_stats: PrefillStats | None = None
    came_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    first_s: float = 0.0  # when its first token was there

    def record(self) -> CompletionRecord:
        record: CompletionRecord = {"first_pause": self.first_pause, "resumed_at": self.resumed_at}
        if self.first_s:
            begun_s = self.started_s or self.came_s
            record["times"] = [begun_s - self.came_s, self.first_s - begun_s, time.monotonic() - self.first_s]
        if self.prompt_pause is not None:
            record["prompt_pause"] = self.prompt_pause
        if self.whole and self.logprobs:
            record["logprobs"] = self.logprobs.tobytes()
        if self.whole and self.rows:
            record["top_ids"] = (
                np.concatenate([row.logprob_token_ids[:, 1:] for row in self.rows]).astype("<i4").tobytes()
            )
            record["top_logprobs"] = np.concatenate([row.logprobs[:, 1:] for row in self.rows]).astype("<f4").tobytes()
        return record


def answer_without_blocks(manager: KVCacheManager) -> None:
    """Has a manager of one kind of blocks answer at once if a running request needs no new block and fills none.

    That is so for 15 of 16 sampled tokens: a step of 512 requests fell from 8.9 to 5.45 ms of a CPU
    (tests/support/scheduler_pair.py, which also compares every decision with vLLM's own).
    """
    kinds = manager.coordinator.single_type_managers
    kind = kinds[0]
    whole_blocks = kind.block_size == manager.block_pool.hash_block_size  # else a prompt's last one is cached apart
    if len(kinds) > 1 or type(kind) is not FullAttentionManager or not whole_blocks:
        return
    size, held, cached, most = kind.block_size, kind.req_to_blocks, kind.num_cached_block, manager.max_model_len
    allocate, cache, running = manager.allocate_slots, manager.cache_blocks, RequestStatus.RUNNING

    def allocate_slots(
        request: Request, num_new_tokens: int, *more: object, num_lookahead_tokens: int = 0, **given: object
    ) -> KVCacheBlocks | None:
        computed = request.num_computed_tokens + num_new_tokens
        if (
            request.status is running
            and not more
            and not given
            and num_new_tokens > 0
            and computed + num_lookahead_tokens <= min(most, size * len(held[request.request_id]))
            and min(computed, request.num_tokens) // size <= cached.get(request.request_id, 0)
        ):
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **given)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    replace(manager, "allocate_slots", allocate_slots)
    replace(manager, "cache_blocks", cache_blocks)


_coordinate = DPCoordinatorProc.run_coordinator


def coordinate(*args: object, **kwargs: object) -> None:
    """vLLM's process beside several data-parallel parts, which by itself outlives a program that is killed."""
    end_with_parent()
    _coordinate(*args, **kwargs)


class WholeCompletions(Scheduler):  # type: ignore[misc]  # vLLM has no types here
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        self._unfinished: dict[str, UnfinishedRequest] = {}
        self._pauses = 0  # that have ended
        self._preempted = 0  # since the last record
        answer_without_blocks(self.kv_cache_manager)
        # Until 0.32 there is one number for the sequences that may run and for those that there is room for.
        self._seats = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        self._most_running = min(int(getattr(self, self._seats)), self.max_num_running_reqs - PROBE_SEATS)
        self._ahead: set[str] = set()  # requests that go ahead and are not finished

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and request.request_id not in self._unfinished:
            self._unfinished[request.request_id] = UnfinishedRequest(
                whole=bool((params.extra_args or {}).get(WHOLE_KEY)),
                alternatives=params.logprobs or 0,
                first_pause=self._pauses,
            )
        super().add_request(request)
        if request.priority == AHEAD:
            self._ahead.add(request.request_id)
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        self._ahead &= self.requests.keys()
        setattr(self, self._seats, max(self._most_running + min(len(self._ahead), PROBE_SEATS), len(self.running)))
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        for begun in output.scheduled_new_reqs:
            if (unfinished := self._unfinished.get(begun.req_id)) is not None and not unfinished.started_s:
                unfinished.started_s = time.monotonic()
        return output

    def _preempt_request(self, *args: object, **kwargs: object) -> None:
        self._preempted += 1
        super()._preempt_request(*args, **kwargs)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._unfinished.pop(request.request_id, None)
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        """A version may end where a pause ends: every engine process counts them alike.

        Requests whose prompt is not begun yet have the old version's salt, so they read no cached blocks.
        """
        if pause_state is PauseState.UNPAUSED and self.pause_state is not PauseState.UNPAUSED:
            for request_id, unfinished in self._unfinished.items():
                unfinished.resumed_at.append(unfinished.num_tokens)
                request = self.requests.get(request_id)
                if request is None:
                    continue
                if request.num_computed_tokens == 0:
                    request.skip_reading_prefix_cache = True
                elif unfinished.num_tokens == 0 and unfinished.prompt_pause is None:
                    unfinished.prompt_pause = self._pauses
            self._pauses += 1
        super().set_pause_state(pause_state)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        taken = self._take_logprobs(model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        rows = model_runner_output.req_id_to_index
        for batch in outputs.values():
            if batch.outputs:
                batch.outputs = [output for output in batch.outputs if self._is_due(output, taken, rows)]
        return outputs

    def _take_logprobs(self, model_runner_output: ModelRunnerOutput) -> _StepLogprobs | None:
        lists = model_runner_output.logprobs
        if lists is None or not all(
            unfinished.whole
            for request_id in model_runner_output.req_ids
            if (unfinished := self._unfinished.get(request_id))
        ):
            return None
        model_runner_output.logprobs = None
        return _StepLogprobs(lists=lists, sampled=lists.logprobs[:, 0].tolist(), starts=lists.cu_num_generated_tokens)

    def _is_due(self, output: EngineCoreOutput, taken: _StepLogprobs | None, rows: dict[str, int]) -> bool:
        unfinished = self._unfinished.get(output.request_id)
        if unfinished is None:
            return True
        count = len(output.new_token_ids)
        unfinished.num_tokens += count
        if count and not unfinished.first_s:
            unfinished.first_s = time.monotonic()
        if unfinished.whole:
            unfinished.tokens.extend(output.new_token_ids)
            if taken is not None and count:
                taken.give(unfinished, rows[output.request_id], count)
            elif output.new_logprobs is not None:
                unfinished.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                if unfinished.alternatives:
                    unfinished.rows.append(output.new_logprobs)
            output.new_logprobs = None
            if output.routed_experts is not None:
                unfinished.experts.append(output.routed_experts)
            unfinished.prefill_stats = unfinished.prefill_stats or output.prefill_stats
            if output.finish_reason is None:
                output.new_token_ids = []  # they leave with the last output; the prompt's logprobs come but once
                return output.new_prompt_logprobs_tensors is not None
            output.new_token_ids = unfinished.tokens.tolist()
            output.prefill_stats = unfinished.prefill_stats
            output.routed_experts = np.concatenate(unfinished.experts) if unfinished.experts else None
        if output.finish_reason is not None:
            del self._unfinished[output.request_id]
            record = unfinished.record()
            record["queue"], self._preempted = [len(self.waiting), self._preempted], 0
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), RECORD_KEY: record}
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepLogprobs:
    """(R, 1 + K) over the requests' tokens; the first column is the sampled token."""

    lists: LogprobsLists
    sampled: list[float]
    starts: list[int] | None  # row of each request's first token; None when each has one token

    def give(self, unfinished: UnfinishedRequest, index: int, count: int) -> None:
        start = index if self.starts is None else self.starts[index]
        if count == 1:
            unfinished.logprobs.append(self.sampled[start])
        else:
            unfinished.logprobs.extend(self.sampled[start : start + count])
        if unfinished.alternatives:
            columns = 1 + unfinished.alternatives
            unfinished.rows.append(
                LogprobsLists(
                    self.lists.logprob_token_ids[start : start + count, :columns],
                    self.lists.logprobs[start : start + count, :columns],
                    self.lists.sampled_token_ranks[start : start + count],
                    None,
                )
            )


class SerialScheduler(WholeCompletions, Scheduler):  # type: ignore[misc]  # as above
    """For engines that schedule a step once the one before is done."""


class OverlappedScheduler(WholeCompletions, AsyncScheduler):  # type: ignore[misc]  # as above
    """For engines that schedule a step while the one before still runs."""
