"""Writes the golden files of the losses from plain Python floats, one token at a time; run it only to add a case.

    python tests/golden/losses/make_golden.py

It shares no code with the losses: formulas and gradients are written out by hand from the papers.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def dppo_kl(
    logp: float, logq: float, adv: float, *, mask_low: float, mask_high: float, adv_tau: float, kl_tau: float
) -> tuple[float, float, bool]:
    """Loss, derivative by logp, and whether the token is masked."""
    change = math.exp(logp) - math.exp(logq)
    masked = (adv > 0 and change > mask_high) or (adv < 0 and -change > mask_low)
    ratio = math.exp(logp - logq)
    policy = 0.0 if masked else adv_tau * adv * ratio
    return -policy + kl_tau * (logp - logq) ** 2, -policy + 2.0 * kl_tau * (logp - logq), masked


def aipo(logp: float, logq: float, adv: float, *, delta: float) -> tuple[float, float, bool]:
    """Loss, derivative by logp, and whether the token is masked (never)."""
    weight = min(math.exp(logp - logq), delta)
    return -weight * adv * logp, -weight * adv, False


def main() -> None:
    rng = random.Random(0)
    tokens = [(-0.05, -1.5, 1.0), (-1.5, -0.05, -1.0), (-0.05, -1.5, -1.0), (-1.5, -0.05, 1.0), (-2.0, -2.0, 0.0)]
    tokens += [(-rng.expovariate(1.0), -rng.expovariate(1.0), rng.gauss(0.0, 1.0)) for _ in range(19)]
    cases: dict[str, tuple[Any, dict[str, float]]] = {
        "dppo_kl": (dppo_kl, {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}),
        "dppo_kl_uneven": (dppo_kl, {"mask_low": 0.1, "mask_high": 0.4, "adv_tau": 0.5, "kl_tau": 0.1}),
        "aipo": (aipo, {"delta": 4.0}),
        "aipo_tight": (aipo, {"delta": 1.05}),
    }
    for name, (loss, parameters) in cases.items():
        rows = [loss(*token, **parameters) for token in tokens]
        record = {
            "loss": name.split("_")[0],
            "parameters": parameters,
            "logprobs": [token[0] for token in tokens],
            "inference_logprobs": [token[1] for token in tokens],
            "advantages": [token[2] for token in tokens],
            "per_token": [row[0] for row in rows],
            "gradient": [row[1] for row in rows],
            "masked": [row[2] for row in rows],
        }
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
