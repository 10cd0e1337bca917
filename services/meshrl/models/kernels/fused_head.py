"""The head's passes over logits on a GPU as one kernel: logprob, entropy and log-sum-exp, and the gradient of a logit.

It moves about half of what torch.compile's code does. Importing this module needs triton.

Shapes: P tokens of a piece, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 4096, 8  # of a token's logits at once: the fastest of those tried on an H200


def score(
    logits_PV: torch.Tensor,
    targets_P: torch.Tensor,
    temperatures_P: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slope_PV: torch.Tensor | None,
) -> None:
    """Writes logprob, entropy and log-sum-exp (P,), float32, into `results`, and d logprob / d logit into `slope_PV`. A
    target beyond the V logits counts as one of them."""
    if len(logits_PV):
        _score[(len(logits_PV),)](
            logits_PV, logits_PV if slope_PV is None else slope_PV, targets_P, temperatures_P, *results,
            logits_PV.shape[1], SLOPE=slope_PV is not None, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, slopes, targets, temperatures, logprobs, entropies, lses, vocab, SLOPE: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * vocab
    scale = 1.0 / tl.load(temperatures + token)
    target = tl.load(targets + token)
    columns = tl.arange(0, COLUMNS)
    # Of each column: its highest, and the sums of exp(x - highest) and of that times x. A NaN reaches the sums.
    highest = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    weighted = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        x = tl.load(logits + start + columns, mask=start + columns < vocab, other=-float("inf")) * scale
        higher = tl.maximum(highest, x)
        shrunk, weight = tl.exp(highest - higher), tl.exp(x - higher)
        total = total * shrunk + weight
        weighted = weighted * shrunk + tl.where(weight > 0, weight * x, 0.0)
        highest = higher
    top = tl.max(highest, 0)
    shrunk = tl.exp(highest - top)
    sum_of_all = tl.sum(total * shrunk, 0)
    lse = top + tl.log(sum_of_all)
    chosen = tl.load(logits + tl.minimum(tl.maximum(target, 0), vocab - 1)) * scale
    tl.store(logprobs + token, chosen - lse)
    tl.store(entropies + token, lse - tl.sum(weighted * shrunk, 0) / sum_of_all)
    tl.store(lses + token, lse)
    if SLOPE:
        slopes += token * vocab
        for start in range(0, vocab, COLUMNS):
            at = start + columns
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")) * scale
            slope = (tl.where(at == target, 1.0, 0.0) - tl.exp(x - lse)) * scale
            tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=at < vocab)
