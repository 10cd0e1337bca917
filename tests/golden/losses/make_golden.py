"""Writes the golden files of the losses and of the objective; run it only to add a case.

    python tests/golden/losses/make_golden.py

The numbers come from `paper_losses`, which shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from paper_losses import PAPERS, Setting, TokenSequence, objective

FOLDER = Path(__file__).parent

Tokens = list[tuple[float, float, float]]  # logp, logq, advantage


def far_tokens() -> list[Tokens]:
    """Tokens far from the policy that sampled them, one a sequence."""
    rng = random.Random(0)
    tokens = [(-0.05, -1.5, 1.0), (-1.5, -0.05, -1.0), (-0.05, -1.5, -1.0), (-1.5, -0.05, 1.0), (-2.0, -2.0, 0.0)]
    tokens += [(-rng.expovariate(1.0), -rng.expovariate(1.0), rng.gauss(0.0, 1.0)) for _ in range(19)]
    return [[token] for token in tokens]


def near_sequences() -> list[Tokens]:
    """Sequences a little off policy, with drifts of both signs, an advantage each."""
    rng = random.Random(1)
    sequences = []
    for length, drift, advantage in [
        (1, 0.0, 1.0),
        (3, 0.3, 1.0),
        (5, -0.3, 1.0),
        (4, 0.3, -0.5),
        (2, -0.3, -0.5),
        (6, 0.0, 0.0),
        (7, 0.01, 2.0),
    ]:
        logps = [-rng.expovariate(1.0) for _ in range(length)]
        sequences.append([(logp, logp - drift + rng.gauss(0.0, 0.05), advantage) for logp in logps])
    return sequences


LOSSES: dict[str, tuple[str, dict[str, float], list[Tokens]]] = {
    "dppo_kl": ("dppo", {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}, far_tokens()),
    "dppo_kl_uneven": ("dppo", {"mask_low": 0.1, "mask_high": 0.4, "adv_tau": 0.5, "kl_tau": 0.1}, far_tokens()),
    "aipo": ("aipo", {"delta": 4.0}, far_tokens()),
    "aipo_tight": ("aipo", {"delta": 1.05}, far_tokens()),
    "grpo": ("grpo", {"clip_low": 0.2, "clip_high": 0.2}, far_tokens()),
    "grpo_clip_higher": ("grpo", {"clip_low": 0.2, "clip_high": 0.28}, near_sequences()),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, near_sequences()),
    "gspo_paper": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, near_sequences()),
    "cispo": ("cispo", {"clip_high": 0.28}, far_tokens()),
    "cispo_both": ("cispo", {"clip_high": 0.28, "clip_low": 0.2}, far_tokens()),
    "ce": ("ce", {}, near_sequences()),
}

OBJECTIVES: dict[str, Setting] = {
    "dapo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.28}, "token", None, 0.5, 1.2),
    "grpo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.2}, "sequence", None, 0.1, 4.0),
    "dr_grpo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.2}, "fixed", 16, 1.0, 4.0),
    "gspo": Setting("gspo", {"clip_low": 0.05, "clip_high": 0.1}, "sequence", None, 1.0, 1.05),
    "default": Setting(
        "dppo", {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}, "token", None, 1.0, 4.0
    ),
}


def mixed_batch() -> list[TokenSequence]:
    """Sequences whose tokens are of the rl, the ce and the ref_kl term, of several or of none; one is not sampled."""
    rng = random.Random(2)
    batch = []
    for index, tokens in enumerate(near_sequences()):
        length = len(tokens)
        batch.append(
            TokenSequence(
                logp=[token[0] for token in tokens],
                logq=[token[1] for token in tokens],
                adv=[token[2] for token in tokens],
                sampled=[index != 2 and rng.random() < 0.7 for _ in range(length)],
                rl_weights=[rng.choice([1.0, 0.5, 0.0]) for _ in range(length)],
                ce_weights=[rng.choice([0.0, 0.0, 1.0, 0.25]) for _ in range(length)],
                ref_kl_weights=[rng.choice([0.0, 0.3, 1.0]) for _ in range(length)],
                ref=[token[0] + rng.gauss(0.0, 0.5) for token in tokens],
            )
        )
    return batch


def loss_record(loss: str, parameters: dict[str, float], sequences: list[Tokens]) -> dict[str, Any]:
    per_token: list[float] = []
    gradient: list[float] = []
    masked: list[bool] = []
    for tokens in sequences:
        logp, logq, adv = (list(column) for column in zip(*tokens, strict=True))
        per_token += PAPERS[loss].values(logp, logq, adv, logp, **parameters)
        gradient += [sum(column) for column in zip(*PAPERS[loss].jacobian(logp, logq, adv, **parameters), strict=True)]
        masked += PAPERS[loss].masked(logp, logq, adv, **parameters)
    return {
        "loss": loss,
        "parameters": parameters,
        "lengths": [len(tokens) for tokens in sequences],
        "logprobs": [token[0] for tokens in sequences for token in tokens],
        "inference_logprobs": [token[1] for tokens in sequences for token in tokens],
        "advantages": [token[2] for tokens in sequences for token in tokens],
        "per_token": per_token,
        "gradient": gradient,
        "masked": masked,
    }


def main() -> None:
    for name, (loss, parameters, sequences) in LOSSES.items():
        record = loss_record(loss, parameters, sequences)
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    batch = mixed_batch()
    totals = {}
    for name, setting in OBJECTIVES.items():
        total, gradient = objective(setting, batch)
        totals[name] = {"setting": dataclasses.asdict(setting), "total": total, "gradient": gradient}
    record = {"batch": [dataclasses.asdict(sequence) for sequence in batch], "objectives": totals}
    (FOLDER / "objectives").mkdir(exist_ok=True)
    (FOLDER / "objectives" / "mixed.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
