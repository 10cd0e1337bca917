import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paper_losses
from meshrl.algorithms.losses import dppo_kl_loss, grpo_loss, gspo_loss
from meshrl.algorithms.objective import BatchCounts, Normaliser, Objective, RowTokens, objective_loss

GOLDEN = json.loads((Path(__file__).parent / "objectives" / "mixed.json").read_text())
LOSSES = {"dppo": dppo_kl_loss, "grpo": grpo_loss, "gspo": gspo_loss}
STEP = 1e-6


def objective_of(setting: dict[str, Any]) -> Objective:
    return Objective(
        loss=functools.partial(LOSSES[setting["loss"]], **setting["parameters"]),
        normaliser=Normaliser(setting["normaliser"]),
        fixed_length=setting["fixed_length"],
        ref_kl_tau=setting["ref_kl_tau"],
        ref_kl_delta=setting["ref_kl_delta"],
    )


def row_of(batch: list[dict[str, Any]]) -> RowTokens:
    def column(key: str) -> torch.Tensor:
        return torch.tensor([value for sequence in batch for value in sequence[key]], dtype=torch.float64)

    lengths = torch.tensor([len(sequence["logp"]) for sequence in batch])
    return RowTokens(
        logprobs=column("logp").requires_grad_(),
        inference_logprobs=column("logq"),
        advantages=column("adv"),
        rl_mask=column("sampled").bool(),
        sequence_ids=torch.repeat_interleave(torch.arange(len(batch)), lengths),
        num_sequences=len(batch),
        rl_weights=column("rl_weights"),
        ce_weights=column("ce_weights"),
        ref_kl_weights=column("ref_kl_weights"),
        ref_logprobs=column("ref"),
    )


def counts_of(batch: list[dict[str, Any]]) -> BatchCounts:
    return BatchCounts(
        rl_tokens=sum(sum(sequence["sampled"]) for sequence in batch),
        rl_sequences=sum(any(sequence["sampled"]) for sequence in batch),
        ce_tokens=sum(weight != 0 for sequence in batch for weight in sequence["ce_weights"]),
        ref_kl_tokens=sum(weight != 0 for sequence in batch for weight in sequence["ref_kl_weights"]),
    )


@pytest.mark.parametrize("name", sorted(GOLDEN["objectives"]))
def test_rows_add_up_to_the_golden_objective_and_gradient(name: str) -> None:
    golden = GOLDEN["objectives"][name]
    objective = objective_of(golden["setting"])
    batch = GOLDEN["batch"]
    total = 0.0
    gradient: list[float] = []
    for part in (batch[:3], batch[3:]):  # two micro-batches, the counts of both
        row = row_of(part)
        loss = objective_loss(objective, row, counts_of(batch)).total
        total += loss.item()
        gradient += torch.autograd.grad(loss, row.logprobs)[0].tolist()
    assert total == pytest.approx(golden["total"], abs=1e-12)
    assert gradient == pytest.approx([slope for slopes in golden["gradient"] for slope in slopes], abs=1e-12)


def test_golden_batch_has_tokens_of_each_term_of_several_and_of_none() -> None:
    kinds = {
        (sampled, ce != 0, ref_kl != 0)
        for sequence in GOLDEN["batch"]
        for sampled, ce, ref_kl in zip(
            sequence["sampled"], sequence["ce_weights"], sequence["ref_kl_weights"], strict=True
        )
    }
    assert {(False, False, False), (True, False, False), (False, True, False), (False, False, True)} <= kinds
    assert (True, True, True) in kinds
    assert not any(GOLDEN["batch"][2]["sampled"])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_rl_gradient_matches_finite_differences_of_the_paper(name: str) -> None:
    golden = GOLDEN["objectives"][name]
    without_others = [
        {**sequence, "ce_weights": [0.0] * len(sequence["logp"]), "ref_kl_weights": [0.0] * len(sequence["logp"])}
        for sequence in GOLDEN["batch"]
    ]
    setting = paper_losses.Setting(**golden["setting"])
    slopes = []
    for index, sequence in enumerate(without_others):
        for at in range(len(sequence["logp"])):
            values = []
            for step in (STEP, -STEP):
                moved = [*without_others]
                logp = [value + step * (t == at) for t, value in enumerate(sequence["logp"])]
                moved[index] = {**sequence, "logp": logp}
                values.append(
                    paper_losses.objective(setting, [paper_losses.TokenSequence(**fields) for fields in moved])[0]
                )
            slopes.append((values[0] - values[1]) / (2 * STEP))
    row = row_of(without_others)
    loss = objective_loss(objective_of(golden["setting"]), row, counts_of(without_others)).total
    assert torch.autograd.grad(loss, row.logprobs)[0].tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)
