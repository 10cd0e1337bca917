"""Attention kernels for packed rows on a GPU in half precision, as one operator that is opaque to torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

LENGTH_STEP = 256
OPERATOR = "meshrl::packed_attention"


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedPlan:
    offsets: torch.Tensor  # int32 (S + 1,) on the device
    short_index: torch.Tensor  # int64 on the device: tokens of the short samples, where there are long ones too
    short_offsets: torch.Tensor  # int32 on the device
    host: torch.Tensor  # int64 on the CPU: longest sample, longest short one, then start and end of each long one
    # No tensor has fewer than two elements, for which torch.compile would make a graph of their own.

    @classmethod
    def from_offsets(
        cls, sample_offsets: NDArray[np.int64], device: torch.device, *, long_from: int | None
    ) -> FusedPlan:
        """Samples of at least `long_from` tokens go through cuDNN; None sends none there."""
        starts, lengths = sample_offsets[:-1], np.diff(sample_offsets)
        is_long = np.zeros(len(lengths), dtype=np.bool_) if long_from is None else lengths >= long_from
        short = lengths[~is_long]
        spans = np.stack([starts, starts + lengths], axis=1)[is_long]
        host = np.concatenate([[lengths.max(), short.max(initial=0)], spans.ravel()])
        index = np.flatnonzero(np.repeat(~is_long, lengths)) if is_long.any() and len(short) else np.zeros(2)
        short_offsets = np.concatenate([[0], np.cumsum(short)]) if len(short) else np.zeros(2)
        return cls(
            offsets=upload(sample_offsets.astype(np.int32), device),
            short_index=upload(index.astype(np.int64), device),
            short_offsets=upload(short_offsets.astype(np.int32), device),
            host=torch.from_numpy(host.astype(np.int64)),
        )


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device, without the host waiting for a GPU's queue."""
    # Arrays decoded from a message are read-only views, which torch must not alias.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fused_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    plan: FusedPlan,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within each sample; (T, H, D). `window` is how many tokens back a query sees, itself counted."""
    out_THD, _ = _attention(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        plan.offsets,
        plan.short_index,
        plan.short_offsets,
        plan.host,
        scale,
        -1 if window is None else window - 1,
    )
    return out_THD  # type: ignore[no-any-return]  # a custom operator is untyped


@torch.library.custom_op(OPERATOR, mutates_args=())
def _attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    offsets: torch.Tensor,
    short_index: torch.Tensor,
    short_offsets: torch.Tensor,
    host: torch.Tensor,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output (T, H, D) and the log-sum-exp of the scores, float32 (H, T)."""
    plan = [offsets, short_index, short_offsets, host]
    return attention_forward(query_THD, key_TKD, value_TKD, plan, scale, window_left)


def attention_forward(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    plan: Sequence[torch.Tensor],
    scale: float,
    window_left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan` holds the tensors of a FusedPlan, in order."""
    offsets, short_index, short_offsets, host = plan
    longest, longest_short, *spans = host.tolist()
    if not spans or window_left >= 0:
        return _flash(query_THD, key_TKD, value_TKD, _Flash(offsets, longest, scale, window_left))
    if len(spans) == 2 and not longest_short and longest % LENGTH_STEP == 0:  # one sample: nothing to put together
        out, lse = _cudnn(query_THD, key_TKD, value_TKD, 0, longest, scale)
        return out[0].transpose(0, 1).contiguous(), lse[0, :, :, 0].clone()
    out_THD = torch.empty_like(query_THD)
    lse_HT = query_THD.new_empty(query_THD.shape[1], query_THD.shape[0], dtype=torch.float32)
    if longest_short:
        query, key, value = (tensor.index_select(0, short_index) for tensor in (query_THD, key_TKD, value_TKD))
        out, lse = _flash(query, key, value, _Flash(short_offsets, longest_short, scale, window_left))
        out_THD.index_copy_(0, short_index, out)
        lse_HT.index_copy_(1, short_index, lse)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        out, lse = _cudnn(query_THD, key_TKD, value_TKD, start, end, scale)
        out_THD[start:end] = out[0].transpose(0, 1)[: end - start]
        lse_HT[:, start:end] = lse[0, :, : end - start, 0]
    return out_THD, lse_HT


def output_shapes(query_THD: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query_THD), query_THD.new_empty(query_THD.shape[1], query_THD.shape[0], dtype=torch.float32)


_attention.register_fake(output_shapes)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _attention_backward(
    grad_THD: torch.Tensor,
    inputs: list[torch.Tensor],
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    plan: list[torch.Tensor],
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `inputs`: queries, keys and values."""
    return attention_backward(grad_THD, inputs, out_THD, lse_HT, plan, scale, window_left)


def attention_backward(
    grad_THD: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    plan: Sequence[torch.Tensor],
    scale: float,
    window_left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_THD, key_TKD, value_TKD = inputs
    offsets, short_index, short_offsets, host = plan
    longest, longest_short, *spans = host.tolist()
    if not spans or window_left >= 0:
        return _flash_backward(grad_THD, inputs, out_THD, lse_HT, _Flash(offsets, longest, scale, window_left))
    if len(spans) == 2 and not longest_short and longest % LENGTH_STEP == 0:
        whole = _cudnn_backward(grad_THD, inputs, out_THD, lse_HT, 0, longest, scale)
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in whole)
        return query, key, value
    gradients = (torch.empty_like(query_THD), torch.empty_like(key_TKD), torch.empty_like(value_TKD))
    if longest_short:
        grad, *short, out = (tensor.index_select(0, short_index) for tensor in (grad_THD, *inputs, out_THD))
        lse = lse_HT.index_select(1, short_index)
        parts = _flash_backward(grad, short, out, lse, _Flash(short_offsets, longest_short, scale, window_left))
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.index_copy_(0, short_index, part)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        parts = _cudnn_backward(grad_THD, inputs, out_THD, lse_HT, start, end, scale)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[start:end] = part[0].transpose(0, 1)[: end - start]
    return gradients


def gradient_shapes(
    grad_THD: torch.Tensor, inputs: list[torch.Tensor], *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_THD, key_TKD, value_TKD = inputs
    return torch.empty_like(query_THD), torch.empty_like(key_TKD), torch.empty_like(value_TKD)


_attention_backward.register_fake(gradient_shapes)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.window_left = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_THD: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    query, key, value, *plan, out, lse = ctx.saved_tensors
    gradients = _attention_backward(
        grad_THD.contiguous(), [query, key, value], out, lse, plan, ctx.scale, ctx.window_left
    )
    return (*gradients, None, None, None, None, None, None)


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


class _Flash(NamedTuple):
    offsets: torch.Tensor  # int32 (S + 1,)
    longest: int  # tokens
    scale: float
    window_left: int  # tokens before a query that it sees; -1 is all of them

    @property
    def window(self) -> dict[str, int]:
        return {} if self.window_left < 0 else {"window_size_left": self.window_left, "window_size_right": 0}


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: _Flash
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, how.offsets, how.offsets, how.longest, how.longest, 0.0, True, False,
        scale=how.scale, **how.window,
    )  # fmt: skip
    return out, lse


def _flash_backward(
    grad: torch.Tensor, inputs: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, how: _Flash
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        grad, *inputs, out, lse.contiguous(), how.offsets, how.offsets, how.longest, how.longest, 0.0, True,
        nothing, nothing, scale=how.scale, **how.window,
    )  # fmt: skip
    return gradients


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, end: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (1, H, L, D) and log-sum-exp (1, H, L, 1) of one sample, L rounded up."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_one_sample(tensor, start, end) for tensor in (query, key, value)), None, True, 0.0, True, False, scale=scale
    )
    return out, lse


def _cudnn_backward(
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    start: int,
    end: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (1, H, L, D) of one sample, L rounded up."""
    samples = [_one_sample(tensor, start, end) for tensor in (grad, *inputs, out)]
    length = samples[0].shape[2]
    padded = F.pad(lse[:, start:end], (0, length - (end - start)))[None, :, :, None].contiguous()
    # The state of the random generator, which is read for dropout only.
    nothing = torch.zeros((), dtype=torch.int64, device=grad.device)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *samples, padded, nothing, nothing, None, None, None, length, length, 0.0, True, scale=scale
        )
    )
    return gradients


def _one_sample(tensor_THD: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """(1, H, L, D) view of a sample, or a copy padded with zeros to a multiple of LENGTH_STEP."""
    sample_LHD = tensor_THD[start:end]
    missing = -(end - start) % LENGTH_STEP
    if missing:
        sample_LHD = F.pad(sample_LHD, (0, 0, 0, 0, 0, missing))
    return sample_LHD.transpose(0, 1)[None]
