"""Groups, rollouts and their samples. T tokens of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types.routes import Routes
from meshrl.wire.types.runs import ServedVersion


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A field left at None takes the environment's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def over(self, default: Sampling) -> Sampling:
        return replace(default, **{name: value for name, value in vars(self).items() if value not in (None, ())})


@dataclass(frozen=True, kw_only=True)
class EnvironmentInfo:
    """`num_tasks` is None when the taskset is infinite."""

    name: str
    taskset: str
    num_tasks: int | None
    agents: tuple[str, ...] = ()
    default_sampling: Sampling = field(default_factory=Sampling)
    package_version: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A group: `group_size` rollouts of one task. At most one of min_version, exact_version.

    `scores_only`: logprobs need not fit training. `conversations`, `routed_experts`: rollouts hold messages, or tokens'
    experts. `run_id`: the run whose policy plays, empty for the engines' only one. `linger_s`: the group outlives a
    broken stream for so long; `after_seq` attaches to it again, behind that event.
    """

    request_id: str
    group_id: str
    environment: str
    task_index: int | None = None
    task_payload: str | None = None
    group_size: int
    sampling: Sampling = field(default_factory=Sampling)
    engine_pool: str = ""
    min_version: int | None = None
    exact_version: int | None = None
    deadline_s: float
    traceparent: str = ""
    scores_only: bool = False
    conversations: bool = False
    routed_experts: bool = False
    run_id: str = ""
    linger_s: float = 0.0
    after_seq: int | None = None


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """`version` sampled tokens [start, end).

    `prompt_version`, on a reply's first span: the oldest version that computed a part of the prompt's KV cache, if it
    is another.
    """

    start: int
    end: int
    version: int
    prompt_version: int | None = None

    @property
    def oldest(self) -> int:
        return self.version if self.prompt_version is None else min(self.version, self.prompt_version)


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """Tokens [start, end) are one message of `role`; `text` is for people.

    [content_start, content_end) are its content, the others markup of the chat template. None: not separated.
    """

    start: int
    end: int
    role: str
    text: str = ""
    content_start: int | None = None
    content_end: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    token_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,) true where the policy sampled the token
    logprobs: NDArray[np.float32]  # (T,) of the distribution sampled from; 0 where loss_mask is false
    version_spans: tuple[VersionSpan, ...]  # sorted, disjoint, cover loss_mask
    message_spans: tuple[MessageSpan, ...] = ()
    temperature: float = 1.0
    routed_experts: Routes | None = None  # (T, L, K) where asked for, of a mixture of experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A finished, scored episode of one agent."""

    rollout_id: str
    group_id: str
    task_key: str
    environment: str
    agent: str = ""
    samples: tuple[Sample, ...]
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    truncated: bool = False
    num_turns: int = 1
    timings_s: Mapping[str, float] = field(default_factory=dict)
    traceparent: str = ""
    completion: str = ""
    episode_id: str = ""  # of all agents' rollouts that one episode gave; empty: not said
    conversations: tuple[str, ...] = ()  # where asked for: JSON of {"messages", "tools"}, one for each history
    run_id: str = ""
    start_time: float | None = None  # seconds of the epoch
    end_time: float | None = None

    def without_routes(self) -> Rollout:
        if all(sample.routed_experts is None for sample in self.samples):
            return self
        return replace(self, samples=tuple(replace(sample, routed_experts=None) for sample in self.samples))

    @property
    def oldest_version(self) -> int | None:
        """That sampled a token, or computed a prompt. None without a sampled token."""
        spans = (span for sample in self.samples for span in sample.version_spans)
        return min((span.oldest for span in spans), default=None)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def sampled_tokens(self) -> int:
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)


@dataclass(frozen=True, kw_only=True)
class RolloutFailure:
    """`reason` is of the error catalogue, `traceparent` of its own trace."""

    rollout_id: str
    group_id: str
    reason: str
    message: str
    retryable: bool
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """End of a group: finished + failed + cancelled is the group size."""

    finished: int
    failed: int
    cancelled: int
    sampled_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExpertsPart:
    """Rows of a later rollout's `Sample.routed_experts`, behind those of earlier parts."""

    rollout_id: str
    sample: int
    routed_experts: Routes


RolloutEvent = Rollout | RolloutFailure | RolloutSummary


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """An engine as the rollout server sees it.

    `logprobs_mode`: processed_logprobs of the distribution sampled from, raw_logprobs before temperature and cuts, ""
    if unknown. `slots`: sequences decoded at once. `kv_tokens`: size of its KV cache. None if not reported.
    """

    url: str
    healthy: bool
    version: int | None
    in_flight: int
    logprobs_mode: str = ""
    slots: int | None = None
    kv_tokens: int | None = None
    served: tuple[ServedVersion, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RolloutStatus:
    """Counts rollouts, not groups. At most `max_concurrent` run now, for `limit_reason`. None or 0 if not reported."""

    running: int
    queued: int
    finished: int
    failures: Mapping[str, int]
    rollouts_per_s: float
    engines: tuple[EngineEndpoint, ...]
    draining: bool
    max_concurrent: int | None = None
    limit_reason: str = ""
