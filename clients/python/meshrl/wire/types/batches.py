"""Batches, steps and runs of a trainer. T tokens of a micro-batch, S samples, K candidates of a token."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types.routes import Routes
from meshrl.wire.types.runs import AdapterSpec, RunInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Samples packed into one row; attention never crosses `sample_offsets`, but for a shared prefix.

    `loss_mask` marks the rl term's tokens. The weights after it are None where no token has one: rl then weighs each of
    its tokens 1, ce and ref_kl have none. A token is of ce or ref_kl if its weight is not 0.

    A sample with `prefix_tokens` above 0 follows so many first tokens of the sample `prefix_samples`, and does not
    repeat them: that one has as many of its own, and no prefix.
    """

    dp_rank: int
    token_ids: NDArray[np.int32]  # (T,)
    position_ids: NDArray[np.int32]  # (T,) restart at 0, or at its prefix_tokens, with each sample
    loss_mask: NDArray[np.bool_]  # (T,)
    advantages: NDArray[np.float32]  # (T,)
    inference_logprobs: NDArray[np.float32]  # (T,) 0 where loss_mask is false and no ref_kl token was sampled
    sample_offsets: NDArray[np.int64]  # (S + 1,) start of each sample, then T
    temperatures: NDArray[np.float32]  # (S,)
    env_index: NDArray[np.int32]  # (S,) index into Batch.environments
    rollout_ids: tuple[str, ...]  # (S,)
    traceparents: tuple[str, ...] = ()
    rl_weights: NDArray[np.float32] | None = None  # (T,) read where loss_mask is true
    ce_weights: NDArray[np.float32] | None = None  # (T,)
    ref_kl_weights: NDArray[np.float32] | None = None  # (T,)
    ref_logprobs: NDArray[np.float32] | None = None  # (T,) with ref_kl_weights; read where those are not 0
    prefix_tokens: NDArray[np.int32] | None = None  # (S,)
    prefix_samples: NDArray[np.int32] | None = None  # (S,) with prefix_tokens; read where those are not 0
    ref_top_ids: NDArray[np.int32] | None = None  # (T, K) candidates of ref_kl tokens, with ref_kl_weights; -1: none
    ref_top_logprobs: NDArray[np.float32] | None = None  # (T, K) with ref_top_ids; read where those are not -1
    routed_experts: Routes | None = None  # (T, L, K) experts that each token is to go through; None: the trainer's own

    @property
    def shared_tokens(self) -> int:
        """Tokens that samples do not repeat."""
        return 0 if self.prefix_tokens is None else int(self.prefix_tokens.sum())

    @property
    def unpredicted(self) -> NDArray[np.int64]:
        """First tokens of samples without a prefix, which nothing predicts."""
        starts = self.sample_offsets[:-1]
        return starts if self.prefix_tokens is None else starts[self.prefix_tokens == 0]

    @property
    def sources(self) -> NDArray[np.int64]:
        """(T,) index of each token's predictor, -1 for none."""
        before = np.arange(-1, len(self.token_ids) - 1, dtype=np.int64)
        before[self.sample_offsets[:-1]] = -1
        if self.prefix_tokens is not None and self.prefix_samples is not None:
            shares = self.prefix_tokens > 0
            first = self.sample_offsets[:-1][self.prefix_samples[shares]]
            before[self.sample_offsets[:-1][shares]] = first + self.prefix_tokens[shares] - 1
        return before


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """`loss_tokens` counts loss_mask over all micro-batches."""

    run_id: str
    step: int
    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int
    environments: tuple[str, ...]
    traceparent: str = ""
    logprob_rollouts: tuple[str, ...] = ()  # whose logprobs the DONE event is to carry

    def without_routes(self) -> Batch:
        """Of the same digest; the trainer's routers then choose."""
        return replace(self, micro_batches=tuple(replace(row, routed_experts=None) for row in self.micro_batches))


@dataclass(frozen=True, kw_only=True)
class BatchHeader:
    run_id: str
    step: int
    digest: str
    num_micro_batches: int
    loss_tokens: int
    environments: tuple[str, ...]
    traceparent: str = ""
    logprob_rollouts: tuple[str, ...] = ()
    routes_digest: str = ""  # of routed_experts, which `digest` leaves out; empty where there are none


@dataclass(frozen=True, kw_only=True)
class RoutedShape:
    """`per_token` of `experts`, at each of `layers` routers."""

    layers: int
    per_token: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class TrainerInfo:
    world_size: int
    dp_size: int
    seq_len: int
    pad_multiple: int
    objective: str
    model: str
    runs: tuple[RunInfo, ...]
    max_queued_batches: int
    vocab_size: int | None = None  # of the model; None or 0: not known
    max_message_bytes: int | None = None  # of a message of SubmitBatch; None or 0: not known
    min_shared_prefix: float | None = None  # least share of a batch's tokens to leave out; None: it takes no prefixes
    router_replay: RoutedShape | None = None  # of the routes that rows carry; None: it replays none
    max_runs: int = 0  # 0 from a trainer of 1.0, which holds one
    max_adapter_rank: int | None = None  # None: it trains no adapters
    adapter_bytes_total: int | None = None  # with their gradients and optimizers
    adapter_bytes_used: int | None = None
    losses: tuple[str, ...] = ()  # that a LossSpec may name
    default_adapter: AdapterSpec | None = None  # of a run whose spec has none


class StepState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """`version`, `metrics` and `timings_s` are filled when DONE, `reason` when FAILED.

    `logprobs` are the trainer's of Batch.logprob_rollouts: one a token of loss_mask, in the batch's order. `entropies`
    (N,), in nats, are of some tokens.
    """

    revision: int
    step: int
    state: StepState
    version: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    traceparent: str = ""
    durable_step: int = 0  # of the run, when this event was made
    logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by rollout id, (N,) each
    entropies: NDArray[np.float32] | None = None
    artifact_id: str = ""  # of the version, when DONE; empty: not known
    time: float | None = field(default=None, compare=False)  # when it was made, in seconds of the epoch
