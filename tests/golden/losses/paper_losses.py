"""The losses and the objective in plain Python floats, loop by loop from the papers; the golden files come from here.

It shares no code with the package. A loss takes one sequence: the log-probabilities of its tokens under the trained
policy (`logp`), under the one that sampled them (`logq`), and the advantages. `fixed` is what the paper's stop-gradient
sees in place of `logp`: equal to it, but held when `logp` is varied for a finite difference. Derivatives are worked
out by hand: `jacobian[t][u]` is that of token t's loss by `logp[u]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Floats = Sequence[float]


@dataclass(frozen=True)
class Paper:
    values: Callable[..., list[float]]  # (logp, logq, adv, fixed, **parameters)
    jacobian: Callable[..., list[list[float]]]  # (logp, logq, adv, **parameters)
    masked: Callable[..., list[bool]]  # (logp, logq, adv, **parameters)


def _diagonal(derivatives: Floats) -> list[list[float]]:
    size = len(derivatives)
    return [[derivatives[t] if t == u else 0.0 for u in range(size)] for t in range(size)]


# --- DPPO-Binary-TV mask (2602.04879) with the squared log-ratio of 2602.02276


def dppo_masked(
    logp: Floats, logq: Floats, adv: Floats, *, mask_low: float, mask_high: float, **_: float
) -> list[bool]:
    masked = []
    for p, q, a in zip(logp, logq, adv, strict=True):
        change = math.exp(p) - math.exp(q)
        masked.append((a > 0 and change > mask_high) or (a < 0 and -change > mask_low))
    return masked


def dppo_values(logp: Floats, logq: Floats, adv: Floats, fixed: Floats, **constants: float) -> list[float]:
    values = []
    for p, q, a, masked in zip(logp, logq, adv, dppo_masked(fixed, logq, adv, **constants), strict=True):
        policy = 0.0 if masked else constants["adv_tau"] * a * math.exp(p - q)
        values.append(-policy + constants["kl_tau"] * (p - q) ** 2)
    return values


def dppo_jacobian(logp: Floats, logq: Floats, adv: Floats, **constants: float) -> list[list[float]]:
    derivatives = []
    for p, q, a, masked in zip(logp, logq, adv, dppo_masked(logp, logq, adv, **constants), strict=True):
        policy = 0.0 if masked else constants["adv_tau"] * a * math.exp(p - q)
        derivatives.append(-policy + 2.0 * constants["kl_tau"] * (p - q))
    return _diagonal(derivatives)


# --- AIPO (2505.24034) and CISPO (2506.13585): a detached, bounded ratio times A log p


def _never(logp: Floats, *_: Floats, **__: float | None) -> list[bool]:
    return [False] * len(logp)


def aipo_values(logp: Floats, logq: Floats, adv: Floats, fixed: Floats, *, delta: float) -> list[float]:
    return [-min(math.exp(f - q), delta) * a * p for p, q, a, f in zip(logp, logq, adv, fixed, strict=True)]


def aipo_jacobian(logp: Floats, logq: Floats, adv: Floats, *, delta: float) -> list[list[float]]:
    return _diagonal([-min(math.exp(p - q), delta) * a for p, q, a in zip(logp, logq, adv, strict=True)])


def _cispo_weight(p: float, q: float, clip_low: float | None, clip_high: float) -> float:
    ratio = math.exp(p - q)
    if ratio > 1.0 + clip_high:
        return 1.0 + clip_high
    if clip_low is not None and ratio < 1.0 - clip_low:
        return 1.0 - clip_low
    return ratio


def cispo_values(
    logp: Floats, logq: Floats, adv: Floats, fixed: Floats, *, clip_high: float, clip_low: float | None = None
) -> list[float]:
    tokens = zip(logp, logq, adv, fixed, strict=True)
    return [-_cispo_weight(f, q, clip_low, clip_high) * a * p for p, q, a, f in tokens]


def cispo_jacobian(
    logp: Floats, logq: Floats, adv: Floats, *, clip_high: float, clip_low: float | None = None
) -> list[list[float]]:
    tokens = zip(logp, logq, adv, strict=True)
    return _diagonal([-_cispo_weight(p, q, clip_low, clip_high) * a for p, q, a in tokens])


# --- GRPO (2402.03300) with the bounds of DAPO (2503.14476): PPO's surrogate, a token at a time


def _surrogate(ratio: float, a: float, clip_low: float, clip_high: float) -> float:
    clipped = max(1.0 - clip_low, min(1.0 + clip_high, ratio))
    return min(ratio * a, clipped * a)


def _stopped(ratio: float, a: float, clip_low: float, clip_high: float) -> bool:
    return _surrogate(ratio, a, clip_low, clip_high) != ratio * a


def grpo_values(logp: Floats, logq: Floats, adv: Floats, fixed: Floats, **clip: float) -> list[float]:
    return [-_surrogate(math.exp(p - q), a, **clip) for p, q, a in zip(logp, logq, adv, strict=True)]


def grpo_masked(logp: Floats, logq: Floats, adv: Floats, **clip: float) -> list[bool]:
    return [_stopped(math.exp(p - q), a, **clip) for p, q, a in zip(logp, logq, adv, strict=True)]


def grpo_jacobian(logp: Floats, logq: Floats, adv: Floats, **clip: float) -> list[list[float]]:
    derivatives = []
    for p, q, a in zip(logp, logq, adv, strict=True):
        ratio = math.exp(p - q)
        derivatives.append(0.0 if _stopped(ratio, a, **clip) else -a * ratio)
    return _diagonal(derivatives)


# --- GSPO (2507.18071): the same surrogate of one ratio a sequence


def _sequence_ratio(logp: Floats, logq: Floats) -> float:
    return math.exp(math.fsum(p - q for p, q in zip(logp, logq, strict=True)) / len(logp))


def gspo_values(logp: Floats, logq: Floats, adv: Floats, fixed: Floats, **clip: float) -> list[float]:
    ratio = _sequence_ratio(logp, logq)
    return [-_surrogate(ratio, a, **clip) for a in adv]


def gspo_masked(logp: Floats, logq: Floats, adv: Floats, **clip: float) -> list[bool]:
    ratio = _sequence_ratio(logp, logq)
    return [_stopped(ratio, a, **clip) for a in adv]


def gspo_jacobian(logp: Floats, logq: Floats, adv: Floats, **clip: float) -> list[list[float]]:
    ratio = _sequence_ratio(logp, logq)
    rows = []
    for a in adv:
        derivative = 0.0 if _stopped(ratio, a, **clip) else -a * ratio / len(logp)  # ds/dlogp_u = s / len for all u
        rows.append([derivative] * len(logp))
    return rows


# --- supervised fine-tuning


def cross_entropy_values(logp: Floats, logq: Floats, adv: Floats, fixed: Floats) -> list[float]:
    return [-p for p in logp]


def cross_entropy_jacobian(logp: Floats, logq: Floats, adv: Floats) -> list[list[float]]:
    return _diagonal([-1.0] * len(logp))


PAPERS = {
    "dppo": Paper(dppo_values, dppo_jacobian, dppo_masked),
    "aipo": Paper(aipo_values, aipo_jacobian, _never),
    "grpo": Paper(grpo_values, grpo_jacobian, grpo_masked),
    "gspo": Paper(gspo_values, gspo_jacobian, gspo_masked),
    "cispo": Paper(cispo_values, cispo_jacobian, _never),
    "ce": Paper(cross_entropy_values, cross_entropy_jacobian, _never),
}


# --- the objective: three terms, each over its own count


@dataclass(frozen=True)
class TokenSequence:
    """One sequence with its weights; a token is of the rl term where `sampled`, of others by weight."""

    logp: list[float]
    logq: list[float]
    adv: list[float]
    sampled: list[bool]
    rl_weights: list[float]
    ce_weights: list[float]
    ref_kl_weights: list[float]
    ref: list[float]


@dataclass(frozen=True)
class Setting:
    loss: str
    parameters: dict[str, Any]
    normaliser: str
    fixed_length: int | None
    ref_kl_tau: float
    ref_kl_delta: float


def objective(setting: Setting, batch: Sequence[TokenSequence]) -> tuple[float, list[list[float]]]:
    """The value of a whole batch, and its derivative by each sequence's `logp`."""
    gradient = [[0.0] * len(sequence.logp) for sequence in batch]
    total = _rl_term(setting, batch, gradient)
    ce_tokens = sum(weight != 0 for sequence in batch for weight in sequence.ce_weights)
    ref_kl_tokens = sum(weight != 0 for sequence in batch for weight in sequence.ref_kl_weights)
    for sequence, slope in zip(batch, gradient, strict=True):
        for t, p in enumerate(sequence.logp):
            if sequence.ce_weights[t] != 0:
                total += -sequence.ce_weights[t] * p / ce_tokens
                slope[t] -= sequence.ce_weights[t] / ce_tokens
            if sequence.ref_kl_weights[t] != 0:
                ratio = min(math.exp(p - sequence.logq[t]), setting.ref_kl_delta) if sequence.sampled[t] else 1.0
                scale = setting.ref_kl_tau * sequence.ref_kl_weights[t] * ratio / ref_kl_tokens
                total += scale * 0.5 * (p - sequence.ref[t]) ** 2
                slope[t] += scale * (p - sequence.ref[t])
    return total, gradient


def _rl_term(setting: Setting, batch: Sequence[TokenSequence], gradient: list[list[float]]) -> float:
    lengths = [sum(sequence.sampled) for sequence in batch]
    total = 0.0
    for sequence, slope, length in zip(batch, gradient, lengths, strict=True):
        if length == 0:
            continue
        at = [t for t, sampled in enumerate(sequence.sampled) if sampled]
        logp, logq, adv = ([values[t] for t in at] for values in (sequence.logp, sequence.logq, sequence.adv))
        values = PAPERS[setting.loss].values(logp, logq, adv, logp, **setting.parameters)
        jacobian = PAPERS[setting.loss].jacobian(logp, logq, adv, **setting.parameters)
        for i, t in enumerate(at):
            if setting.normaliser == "token":  # DAPO: 1 / sum_i |o_i|
                scale = 1.0 / sum(lengths)
            elif setting.normaliser == "sequence":  # GRPO, GSPO: 1/G sum_i 1/|o_i|
                scale = 1.0 / length / sum(length > 0 for length in lengths)
            else:  # Dr. GRPO: 1/G sum_i 1/constant
                assert setting.fixed_length is not None
                scale = 1.0 / setting.fixed_length / sum(length > 0 for length in lengths)
            scale *= sequence.rl_weights[t]
            total += scale * values[i]
            for j, u in enumerate(at):
                slope[u] += scale * jacobian[i][j]
    return total
