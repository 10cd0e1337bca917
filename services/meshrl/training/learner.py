"""One optimizer step over packed micro-batches; the trainers' loops hand it a batch and get metrics back.

Shapes: N loss tokens of the whole batch on this rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from meshrl.algorithms.losses import Loss, LossInputs
from meshrl.models.attention import PackedLayout
from meshrl.models.logprobs import PackedPolicy, PackedRow
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.optim import build_optimizer, clip_gradients, set_learning_rate, zero_gradient_ratio
from meshrl.training.parallel import ParallelContext
from meshrl.training.scheduler import learning_rate
from meshrl.wire.types import MicroBatch


class StepError(Exception):
    """The step could not be made; weights and optimizer are as before it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRecord:
    """What a step saw of each loss token, for its metrics; all (N,), on the CPU."""

    losses: NDArray[np.float32]  # not yet divided by the normaliser
    logprobs: NDArray[np.float32]
    inference_logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    advantages: NDArray[np.float32]
    masked: NDArray[np.bool_]
    env_index: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """A step that was made."""

    step: int
    tokens: TokenRecord
    loss: float  # sum over the loss tokens divided by the normaliser
    grad_norm: float  # before clipping
    zero_grad_ratio: float
    lr: float
    forward_backward_s: float
    optimizer_s: float


class Learner:
    """A model with its optimizer and schedule.

    Consumes the micro-batches of a step; produces changed weights and a record of the step. Parameters stay float32;
    `compute_dtype` is what the forward pass runs in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: Loss,
        optim: OptimConfig,
        scheduler: SchedulerConfig,
        max_steps: int | None,
        compute_dtype: torch.dtype = torch.float32,
        max_logits_bytes: int = 1 << 28,
        parallel: ParallelContext | None = None,
    ) -> None:
        self.model = model.train()
        self.step_done = 0
        self.policy = PackedPolicy(model, compute_dtype=compute_dtype, max_logits_bytes=max_logits_bytes)
        self.optimizer = build_optimizer(model, optim)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._loss = loss
        self._optim = optim
        self._scheduler = scheduler
        self._max_steps = max_steps
        self.parallel = parallel or ParallelContext()
        self.device = model.device

    def step(self, micro_batches: Sequence[MicroBatch], *, loss_tokens: int) -> StepResult:
        """Accumulates the gradient of the whole batch, clips, steps, and moves the schedule on.

        `loss_tokens` is the normaliser: the batch's over all ranks. Raises StepError, with everything as before, when
        the loss or a gradient is not finite.
        """
        step = self.step_done + 1
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        own = self.parallel.own(micro_batches)
        try:
            records = [self._accumulate(micro_batch, loss_tokens) for micro_batch in own]
            grad_norm = clip_gradients(self._parameters, self._optim.max_norm)
            computed = time.perf_counter()
            tokens = _concatenate(records)
            loss = float(tokens.losses.sum(dtype=np.float64)) / loss_tokens
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise StepError(
                    f"step {step}: loss {loss} with gradient norm {grad_norm} is not finite, so the weights stay as "
                    "they are; look at the batch's logprobs and advantages, or lower optim.lr"
                )
            zero_ratio = zero_gradient_ratio(self._parameters)
            rate = learning_rate(self._scheduler, peak=self._optim.lr, step=step, max_steps=self._max_steps)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        except torch.OutOfMemoryError as error:  # the batch is at fault, not the trainer: the next one may fit
            longest = max(len(micro_batch.token_ids) for micro_batch in own)
            raise StepError(
                f"step {step}: out of device memory on rows of up to {longest} tokens; lower seq_len or "
                f"trainer.max_logits_mib, or use a smaller model ({error})"
            ) from error
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.step_done = step
        return StepResult(
            step=step,
            tokens=tokens,
            loss=loss,
            grad_norm=grad_norm,
            zero_grad_ratio=zero_ratio,
            lr=rate,
            forward_backward_s=computed - started,
            optimizer_s=time.perf_counter() - computed,
        )

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> TokenRecord:
        """The record of this rank's micro-batches without a gradient; nothing changes."""
        self.model.eval()
        try:
            own = self.parallel.own(micro_batches)
            return _concatenate([self._forward(micro_batch)[1] for micro_batch in own])
        finally:
            self.model.train()

    def _accumulate(self, micro_batch: MicroBatch, loss_tokens: int) -> TokenRecord:
        loss_sum, record = self._forward(micro_batch)
        if loss_sum is not None:
            torch.autograd.backward(loss_sum / loss_tokens)
        return record

    def _forward(self, micro_batch: MicroBatch) -> tuple[torch.Tensor | None, TokenRecord]:
        """Sum of the token losses and their record. A row without loss is skipped: it has no gradient."""
        mask = micro_batch.loss_mask
        samples = np.repeat(np.arange(len(micro_batch.temperatures)), np.diff(micro_batch.sample_offsets))[mask]
        env_index = micro_batch.env_index[samples]
        if not mask.any():
            return None, _empty_record()
        row = to_row(micro_batch, self.device)
        scored = self.policy(row)
        inputs = LossInputs(
            logprobs=scored.logprobs,
            inference_logprobs=_on(micro_batch.inference_logprobs[mask], self.device),
            advantages=_on(micro_batch.advantages[mask], self.device),
            sequence_ids=_on(samples, self.device),
            num_sequences=len(micro_batch.temperatures),
        )
        output = self._loss(inputs)
        record = TokenRecord(
            losses=_numpy(output.per_token),
            logprobs=_numpy(scored.logprobs),
            inference_logprobs=micro_batch.inference_logprobs[mask],
            entropies=_numpy(scored.entropy),
            advantages=micro_batch.advantages[mask],
            masked=_numpy(output.masked),
            env_index=env_index,
        )
        return output.per_token.sum(), record


def to_row(micro_batch: MicroBatch, device: torch.device) -> PackedRow:
    """Moves a micro-batch to the device and lays it out for packed attention."""
    predicted = np.flatnonzero(micro_batch.loss_mask)
    temperatures = np.repeat(micro_batch.temperatures, np.diff(micro_batch.sample_offsets))[predicted]
    return PackedRow(
        token_ids=_on(micro_batch.token_ids.astype(np.int64), device),
        position_ids=_on(micro_batch.position_ids.astype(np.int64), device),
        layout=PackedLayout.from_offsets(micro_batch.sample_offsets, device),
        predicted=_on(predicted, device),
        temperatures=_on(temperatures, device),
    )


def _on(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    # Arrays decoded from a message are read-only views, which torch must not alias.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _empty_record() -> TokenRecord:
    nothing = np.zeros(0, dtype=np.float32)
    return TokenRecord(
        losses=nothing,
        logprobs=nothing,
        inference_logprobs=nothing,
        entropies=nothing,
        advantages=nothing,
        masked=np.zeros(0, dtype=np.bool_),
        env_index=np.zeros(0, dtype=np.int32),
    )


def _concatenate(records: Sequence[TokenRecord]) -> TokenRecord:
    records = records or [_empty_record()]
    names = TokenRecord.__dataclass_fields__
    return TokenRecord(**{name: np.concatenate([getattr(record, name) for record in records]) for name in names})
