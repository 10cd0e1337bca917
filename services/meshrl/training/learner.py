"""The learner makes a run's step from the packed micro-batches of a batch.

Every rank gets the whole batch and trains the rows of its ParallelPlan; the collectives are inside.

Shapes: P predicted tokens of a row, N rl tokens of the whole batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch import nn

from meshrl.algorithms.objective import BatchCounts, Objective, RowLoss, RowTokens, count, objective_loss
from meshrl.models.adapters import JoinedSets, mounted_set
from meshrl.models.attention import Kernels, PackedLayout
from meshrl.models.expert_lora import ExpertAdapter
from meshrl.models.families import positions_grow_beyond
from meshrl.models.kernels.fused_attention import upload
from meshrl.models.logprobs import PackedPolicy, PackedRow
from meshrl.models.shared_prefix import PrefixPlan
from meshrl.training.checkpoints.random_state import random_state, restore_random_state
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.joined_rows import join_rows, joined_row
from meshrl.training.optim import build_optimizer, clip_gradients, gradient_zeros
from meshrl.training.parallel.fsdp import StepPasses, reshard
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.tensor import settle_gradients
from meshrl.training.routing import RoutingWatch
from meshrl.training.run_state import PassResult, RunState, TokenRecord
from meshrl.wire.types import MicroBatch
from meshrl.wire.types.routes import joined, signed
from meshrl.wire.values import Array

UNREPLAYED_EVERY = 10  # steps; the first row of each rank then takes one forward pass more


class StepError(Exception):
    """The step could not be made; weights and optimizer are as before it, on every rank."""


class UpdateError(Exception):
    """The optimizer failed in its step: some weights are updated and some are not, so none may be used."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """A finished step. Rank 0 has the tokens of all ranks, another rank its own; numbers are of all ranks."""

    step: int
    tokens: TokenRecord
    loss: float  # the objective, over the whole batch
    metrics: Mapping[str, float]  # the objective's terms and what its loss measured, over the whole batch
    grad_norm: float  # before clipping
    zero_grad_ratio: float
    lr: float
    forward_backward_s: float
    optimizer_s: float
    routing: Mapping[str, float] = field(default_factory=dict)  # of a mixture of experts, under the metrics' names


@dataclass(frozen=True, kw_only=True, eq=False)
class RowRecord:
    """One row's forward pass, still on the device: (P,) tensors."""

    loss: RowLoss
    tokens: RowTokens
    entropies: torch.Tensor
    env_index: NDArray[np.int32]  # of the rl tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRows:
    run: RunState
    micro_batches: Sequence[MicroBatch]
    counts: BatchCounts  # by which the terms are divided: of the whole batch, where these are a part


class Learner:
    """A policy on the ranks of a group.

    Every rank makes the same calls with the same rows, in the same order.
    """

    def __init__(
        self,
        policy: PackedPolicy,
        parallel: RankGroup | None = None,
        passes: StepPasses | None = None,
        *,
        pass_tokens: int | None = None,
        partial: Sequence[nn.Parameter] = (),
        optim_cpu_offload: bool = False,
    ) -> None:
        """`passes` are those of a sharded policy; `partial` are those that `divide_layers` named. Rows of up to
        `pass_tokens` go through together; None: each by itself. `optim_cpu_offload`: runs keep their optimizer's state
        in the host's memory."""
        self.policy = policy
        self._passes = passes
        self.model = policy.model
        self.parallel = parallel or RankGroup(device=self.model.device)
        self.device = self.parallel.device
        self._routing = RoutingWatch(policy.routers)
        self._unseen_named = False
        self._run: RunState | None = None
        self._partial = partial
        self._optim_cpu_offload = optim_cpu_offload
        config, plan = self.model.config.get_text_config(), self.parallel.plan
        joins = policy.packed and positions_grow_beyond(config) is None  # each token is at one place of one row
        self._pass_tokens = pass_tokens if joins else None
        self._rows_join = (  # and no random number depends on others
            joins
            and not policy.routers.experts
            and plan.cp == plan.tp == 1
            and not getattr(config, "attention_dropout", 0.0)
            and not any(isinstance(module, nn.Dropout) and module.p for module in self.model.modules())
        )
        policy.train()

    def new_run(
        self,
        *,
        objective: Objective,
        optim: OptimConfig,
        scheduler: SchedulerConfig,
        max_steps: int | None,
        run_id: str = "main",
    ) -> RunState:
        """At step 0, over the mounted set or else the model's trainable parameters. Raises ValueError without any."""
        return RunState(
            run_id=run_id,
            parameters=[parameter for parameter in self.model.parameters() if parameter.requires_grad],
            optimizer=build_optimizer(self.model, optim, cpu_offload=self._optim_cpu_offload),
            objective=objective,
            optim=optim,
            scheduler=scheduler,
            max_steps=max_steps,
            adapters=mounted_set(self.model),
        )

    def take_up(self, run: RunState) -> None:
        """Goes on with the run: mounts its adapters and its random state. Comes before all work on a run's weights."""
        if run is self._run:
            return
        self.put_aside()
        self._run = run
        if run.adapters is not None:
            run.adapters.mount()
        if run.random_state is not None:
            restore_random_state(run.random_state, self.device)

    def put_aside(self) -> None:
        """Keeps the run's random state."""
        if self._run is not None:
            self._run.random_state = random_state(self.device)
        self._run = None

    def joins(self, run: RunState) -> bool:
        """Whether the run's rows may share a pass with other runs': a dense model, no dropout, adapters of linear
        layers."""
        adapters = run.adapters
        return (
            self._rows_join
            and adapters is not None
            and adapters.scale.dropout == 0.0
            and not any(isinstance(adapters.layers[name], ExpertAdapter) for name in adapters.matrices)
        )

    def step(self, run: RunState, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """A step from a whole batch. Raises StepError and UpdateError as its two halves."""
        self.pass_rows([RunRows(run=run, micro_batches=micro_batches, counts=count(micro_batches))])
        return self.optim_step(run)

    def pass_rows(self, parts: Sequence[RunRows]) -> None:
        """Adds the gradient of the rows' objective to each run's gradient.

        Several runs must be such that `joins` holds for; the first rows of all are then one row of the pass, and so on.

        Raises StepError when a loss is not finite (then on every rank), or when a process on its own runs out of device
        memory; a group ends instead. A failure drops the whole gradient of one run, earlier passes included, and leaves
        those of several as before.
        """
        started = time.perf_counter()
        runs, alone = [part.run for part in parts], len(parts) == 1
        joins = [join_rows(part.micro_batches, max_tokens=self._pass_tokens) for part in parts]
        rows = list(zip(*map(self.parallel.plan.own_rows, joins), strict=True))
        longest = max((sum(len(each.token_ids) for each in row) for row in rows), default=0)
        if self.parallel.plan.leads and not self._unseen_named:
            self._name_unseen_positions([micro_batch for part in parts for micro_batch in part.micro_batches])
        if alone:
            self.take_up(runs[0])
            if runs[0].adapters is not None:
                runs[0].adapters.open_gradient()
        else:
            self.put_aside()
        self._routing.begin()
        records: list[list[RowRecord]] = [[] for _ in parts]
        joined: list[JoinedSets] = []
        with self._all_or_nothing(runs[0], f"on rows of up to {longest} tokens", drops=alone):
            for number, row in enumerate(rows, start=1):
                if self._passes is not None:
                    self._passes.before_row(last=number == len(rows))
                with nullcontext() if alone else self._join(runs, row) as sets:
                    made = self._forward_backward(parts, row)
                joined += [] if sets is None else [sets]
                for kept, record in zip(records, made, strict=True):
                    kept.append(record)
            if self._passes is not None:
                self._passes.after_rows()
            # The loss and the objective's metrics, summed over rows; ranks that share rows have the same.
            sums = {
                f"{place}/{name}": value
                for place, made in enumerate(records)
                for name, value in _added({"total": row.loss.total, **row.loss.metrics} for row in made).items()
            }
            summed = self.parallel.sum_named(sums if self.parallel.plan.reports else dict.fromkeys(sums, 0.0))
            results = []
            tokens = [sum(len(row.token_ids) for row in part.micro_batches) for part in parts]
            for place, (part, made) in enumerate(zip(parts, records, strict=True)):
                own_name = f"{place}/"
                metrics = {name[len(own_name) :]: v for name, v in summed.items() if name.startswith(own_name)}
                loss = metrics.pop("total", 0.0)
                if not math.isfinite(loss):
                    raise _not_finite(part.run, f"loss {loss}")
                results.append(
                    PassResult(
                        tokens=self._gathered(record_of(made)),
                        loss=loss,
                        metrics=metrics,
                        router_counts=self._routing.counts(),
                        unreplayed=self._unreplayed(part.run, part.micro_batches),
                        seconds=(time.perf_counter() - started) * tokens[place] / max(1, sum(tokens)),
                    )
                )
            for sets in joined:
                sets.add_gradients()
        for run, result in zip(runs, results, strict=True):
            run.passes.append(result)

    def _join(self, runs: Sequence[RunState], row: Sequence[MicroBatch]) -> JoinedSets:
        sets = [run.adapters for run in runs if run.adapters is not None]
        return JoinedSets(sets, [len(each.token_ids) for each in row], grouped=self.device.type == "cuda")

    def optim_step(self, run: RunState) -> StepResult:
        """Clips the run's gradient, which is used up, and steps its optimizer.

        Raises StepError when the run has no gradient or none that is finite, or when memory runs out before the weights
        are touched, as in `pass_rows`. Raises UpdateError when the optimizer itself fails; over adapters on every rank.
        """
        if not run.passes:
            raise StepError(
                f"step {run.next_step}: run {run.run_id!r} has no gradient to step with; call pass_rows before "
                "each optim_step, and again after one that failed"
            )
        started = time.perf_counter()
        self.take_up(run)
        with self._all_or_nothing(run, "while the gradient was clipped"):
            if run.adapters is not None:
                run.adapters.sum_gradient()
            if self.parallel.tensor is not None:
                settle_gradients(run.parameters, self._partial, self.parallel.tensor)
            grad_norm = clip_gradients(run.parameters, run.optim.max_norm)
            if not math.isfinite(grad_norm):
                raise _not_finite(run, f"gradient norm {grad_norm}")
            zeros, trainable = gradient_zeros(run.parameters)
        rate, passes = run.learning_rate(), list(run.passes)
        mismatch, unreplayed = np.sum([made.unreplayed for made in passes], axis=0)
        failure: UpdateError | None = None
        try:
            run.optimizer.step(rate)
        except Exception as error:  # whatever it is, the weights may be half updated, so no step may follow
            failure = UpdateError(
                f"step {run.next_step}: the optimizer failed in the midst of its step ({error}), so some weights"
                " may be updated and others not: they are given up, go on from the last checkpoint with"
                " --ckpt.resume-step -1; where memory was short, set trainer.model.optim_cpu_offload or use more GPUs"
            )
            if run.adapters is None:  # other ranks may wait in the optimizer's own collectives
                raise failure from error
            failure.__cause__ = error
        finally:
            run.drop_gradient()
        zero_grads, scalars, failed = self.parallel.sum(np.array([float(zeros), trainable, failure is not None]))
        if failed:
            raise failure or UpdateError(f"step {run.next_step}: the optimizer of another rank failed in its step")
        run.step_done = run.next_step
        return StepResult(
            step=run.step_done,
            tokens=TokenRecord.joined([made.tokens for made in passes]),
            loss=sum(made.loss for made in passes),
            metrics=_added(made.metrics for made in passes),
            grad_norm=grad_norm,
            zero_grad_ratio=float(zero_grads / scalars),
            lr=rate,
            forward_backward_s=sum(made.seconds for made in passes),
            routing=self._routing.metrics(np.sum([made.router_counts for made in passes], axis=0), self.parallel)
            | ({"router_replay_mismatch_kl/mean": float(mismatch / unreplayed)} if unreplayed else {}),
            optimizer_s=time.perf_counter() - started,
        )

    @contextmanager
    def _all_or_nothing(self, run: RunState, where: str, *, drops: bool = True) -> Iterator[None]:
        """A failure inside drops the run's gradient. Outside a group, out of memory becomes a StepError."""
        try:
            yield
        except BaseException as error:
            if drops:
                run.drop_gradient()
            if self._passes is not None:
                self._passes.drop()
            # torch has an error type of its own for GPUs only
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not self.parallel.plan.is_alone or not isinstance(error, RuntimeError) or not out_of_memory:
                raise
            raise StepError(  # the batch is at fault, not the trainer: the next one may fit
                f"step {run.next_step}: out of memory {where}; lower seq_len, set trainer.model.ac, lower "
                f"trainer.max_logits_mib, or use more GPUs ({error})"
            ) from error

    def warm_up(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Passes micro-batches forward and backward, so that kernels are compiled."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # dropout falls in the first step as if this had not been
            try:
                for micro_batch in self.parallel.plan.own_rows(micro_batches):
                    logprobs, _ = self.policy(to_row(micro_batch, self.device, self.policy.kernels))
                    torch.autograd.backward(logprobs.sum())
            finally:
                self.model.zero_grad()
                if self._passes is not None:
                    self._passes.drop()

    @torch.no_grad()
    def evaluate(self, run: RunState, micro_batches: Sequence[MicroBatch]) -> TokenRecord:
        """What StepResult.tokens would be; nothing changes."""
        whole = [RunRows(run=run, micro_batches=micro_batches, counts=count(micro_batches))]
        with self._looking(run):
            return self._gathered(
                record_of([self._forward(whole, [row])[0] for row in self.parallel.plan.own_rows(micro_batches)])
            )

    @torch.no_grad()
    def score(self, run: RunState, row: PackedRow) -> torch.Tensor:
        """(N,) logprobs of a row, the same on every rank, still on the device; nothing changes."""
        with self._looking(run):
            logprobs: torch.Tensor = self.policy(row)[0]
            return logprobs

    @contextmanager
    def _looking(self, run: RunState) -> Iterator[None]:
        self.take_up(run)
        self.policy.eval()
        try:
            yield
        finally:
            self.policy.train()
            reshard(self.policy)

    def _name_unseen_positions(self, micro_batches: Sequence[MicroBatch]) -> None:
        meant = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = 1 + max((int(row.position_ids.max()) for row in micro_batches if len(row.position_ids)), default=0)
        if meant is not None and longest > meant:
            self._unseen_named = True
            logger.warning(
                "a sample of {} tokens is beyond the {} positions (max_position_embeddings) that the model was made"
                " for: it is trained on positions that it has not seen; lower seq_len to {}",
                longest, meant, meant,
            )  # fmt: skip

    def _forward_backward(self, parts: Sequence[RunRows], rows: Sequence[MicroBatch]) -> list[RowRecord]:
        made = self._forward(parts, rows)
        # gradients are summed over the ranks, as the rows' losses are
        torch.autograd.backward([row.loss.total for row in made])
        return [replace(row, loss=replace(row.loss, total=row.loss.total.detach())) for row in made]

    def _forward(self, parts: Sequence[RunRows], rows: Sequence[MicroBatch]) -> list[RowRecord]:
        """Also without any token: other ranks wait in the pass's collectives."""
        whole = joined_row(rows)
        share = self.parallel.context
        self._routing.tokens = None if share is None else share.real(len(whole.token_ids))
        logprobs, entropies = self.policy(to_row(whole, self.device, self.policy.kernels))
        predicted = [len(predicted_tokens(row)) for row in rows]
        records = []
        for part, micro_batch, own, own_entropies in zip(
            parts, rows, logprobs.split(predicted), entropies.split(predicted), strict=True
        ):
            tokens = to_tokens(micro_batch, own)
            record = RowRecord(
                loss=objective_loss(part.run.objective, tokens, part.counts),
                tokens=replace(tokens, logprobs=tokens.logprobs.detach(), candidate_logprobs=None),
                entropies=own_entropies,
                env_index=np.repeat(micro_batch.env_index, np.diff(micro_batch.sample_offsets))[micro_batch.loss_mask],
            )
            records.append(record)
        return records

    @torch.no_grad()
    def _unreplayed(self, run: RunState, micro_batches: Sequence[MicroBatch]) -> NDArray[np.float64]:
        """(mismatch_kl, tokens) over the rl tokens of the ranks' first rows, without the choice given to their routers;
        zeros for most steps, and without routes."""
        if run.next_step % UNREPLAYED_EVERY or all(row.routed_experts is None for row in micro_batches):
            return np.zeros(2)
        micro_batch = replace(self.parallel.plan.own_rows(micro_batches)[0], routed_experts=None)
        logprobs, _ = self.policy(to_row(micro_batch, self.device, self.policy.kernels))
        reshard(self.policy)
        tokens = to_tokens(micro_batch, logprobs)
        log_ratio = (tokens.logprobs - tokens.inference_logprobs)[tokens.rl_mask].double()
        mismatch = float((log_ratio.exp() - log_ratio - 1.0).sum())
        return self.parallel.sum(np.array([mismatch, len(log_ratio)]) * self.parallel.plan.reports)

    def _gathered(self, own: TokenRecord) -> TokenRecord:
        if self.parallel.plan.is_alone:
            return own
        counted = None if self.parallel.plan.reports else 0  # tokens
        parts = {name: self.parallel.gather(getattr(own, name)[:counted]) for name in TokenRecord.__dataclass_fields__}
        if not self.parallel.plan.leads:
            return own
        return TokenRecord(**{name: np.concatenate(part or []) for name, part in parts.items()})


def _not_finite(run: RunState, measured: str) -> StepError:
    return StepError(
        f"step {run.next_step}: {measured} is not finite, so the weights stay as they are; look at the batch's "
        "logprobs and advantages, or lower optim.lr"
    )


def _added(parts: Iterable[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def to_row(micro_batch: MicroBatch, device: torch.device, kernels: Kernels | None = None) -> PackedRow:
    """On the device, for packed attention; padded to equal parts if ranks share it."""
    predicted = predicted_tokens(micro_batch)
    offsets, token_ids, position_ids = micro_batch.sample_offsets, micro_batch.token_ids, micro_batch.position_ids
    temperatures = np.repeat(micro_batch.temperatures, np.diff(offsets))[predicted]
    shared, roots, routes = micro_batch.prefix_tokens, micro_batch.prefix_samples, micro_batch.routed_experts
    if kernels is not None and kernels.context is not None and (missing := kernels.context.missing(len(token_ids))):
        token_ids = np.pad(token_ids, (0, missing))  # one more sample, which nothing looks at
        position_ids = np.concatenate([position_ids, np.arange(missing, dtype=position_ids.dtype)])
        offsets = np.append(offsets, len(token_ids))
        shared, roots = (None if each is None else np.append(each, np.int32(0)) for each in (shared, roots))
        routes = joined([(len(micro_batch.token_ids), routes), (missing, None)])
    return PackedRow(
        token_ids=upload(token_ids.astype(np.int64), device),
        position_ids=upload(position_ids.astype(np.int64), device),
        layout=PackedLayout.from_offsets(
            offsets, device, kernels, PrefixPlan.from_samples(offsets, shared, roots, device)
        ),
        predicted=upload(predicted, device),
        sources=upload(micro_batch.sources[predicted], device),
        temperatures=upload(temperatures, device),
        candidates=None
        if micro_batch.ref_top_ids is None
        else upload(micro_batch.ref_top_ids[predicted].astype(np.int64), device).clamp(min=0),
        routes=None if routes is None else upload(signed(routes), device),
    )


def predicted_tokens(micro_batch: MicroBatch) -> NDArray[np.int64]:
    wanted = micro_batch.loss_mask.copy()
    for weights in (micro_batch.ce_weights, micro_batch.ref_kl_weights):
        if weights is not None:
            wanted |= weights != 0
    return np.flatnonzero(wanted)


def to_tokens(micro_batch: MicroBatch, logprobs: torch.Tensor) -> RowTokens:
    """The objective's input of the row's predicted tokens, with the policy's `logprobs`."""
    predicted = predicted_tokens(micro_batch)
    candidate_logprobs = None
    if logprobs.ndim == 2:
        logprobs, candidate_logprobs = logprobs[:, 0], logprobs[:, 1:]
    lengths = np.diff(micro_batch.sample_offsets)
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)[predicted]

    def at_predicted(values: NDArray[np.generic] | None) -> torch.Tensor | None:
        return None if values is None else upload(values[predicted], logprobs.device)

    return RowTokens(
        logprobs=logprobs,
        inference_logprobs=upload(micro_batch.inference_logprobs[predicted], logprobs.device),
        advantages=upload(micro_batch.advantages[predicted], logprobs.device),
        rl_mask=upload(micro_batch.loss_mask[predicted], logprobs.device),
        rl_at=upload(np.flatnonzero(micro_batch.loss_mask[predicted]), logprobs.device),
        sequence_ids=upload(sequence_ids, logprobs.device),
        num_sequences=len(lengths),
        rl_weights=at_predicted(micro_batch.rl_weights),
        ce_weights=at_predicted(micro_batch.ce_weights),
        ce_at=None
        if micro_batch.ce_weights is None
        else upload(np.flatnonzero(micro_batch.ce_weights[predicted]), logprobs.device),
        ref_kl_weights=at_predicted(micro_batch.ref_kl_weights),
        ref_logprobs=at_predicted(micro_batch.ref_logprobs),
        ref_top_ids=at_predicted(micro_batch.ref_top_ids),
        ref_top_logprobs=at_predicted(micro_batch.ref_top_logprobs),
        candidate_logprobs=candidate_logprobs,
        sampled=None
        if micro_batch.ref_kl_weights is None
        else at_predicted(micro_batch.loss_mask | (micro_batch.inference_logprobs != 0.0)),
    )


def record_of(rows: Sequence[RowRecord]) -> TokenRecord:
    """The rl tokens of a step's rows, on the CPU; one copy a quantity."""

    def joined(values: Sequence[torch.Tensor], dtype: torch.dtype) -> Array:
        chosen = [value[row.tokens.rl_at] for value, row in zip(values, rows, strict=True)]
        array: Array = torch.cat(chosen).to("cpu", dtype).numpy() if chosen else torch.zeros(0).to(dtype).numpy()
        return array

    return TokenRecord(
        logprobs=joined([row.tokens.logprobs for row in rows], torch.float32),
        inference_logprobs=joined([row.tokens.inference_logprobs for row in rows], torch.float32),
        entropies=joined([row.entropies for row in rows], torch.float32),
        advantages=joined([row.tokens.advantages for row in rows], torch.float32),
        masked=joined([row.loss.masked for row in rows], torch.bool),
        env_index=np.concatenate([row.env_index for row in rows] or [np.zeros(0, np.int32)]),
    )
