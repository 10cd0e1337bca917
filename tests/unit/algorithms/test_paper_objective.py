"""The objective beside its terms in plain Python, and by finite differences of those."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from meshrl.algorithms.losses import dppo_kl_loss, grpo_loss, gspo_loss
from meshrl.algorithms.objective import BatchCounts, Normaliser, Objective, RowTokens, objective_loss
from paper_losses import Setting, TokenSequence, columns_of, near_sequences, objective

LOSSES = {"dppo": dppo_kl_loss, "grpo": grpo_loss, "gspo": gspo_loss}
SETTINGS = {
    "dapo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.28}, "token", None, 0.5, 1.2),
    "grpo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.2}, "sequence", None, 0.1, 4.0),
    "dr_grpo": Setting("grpo", {"clip_low": 0.2, "clip_high": 0.2}, "fixed", 16, 1.0, 4.0),
    "gspo": Setting("gspo", {"clip_low": 0.05, "clip_high": 0.1}, "sequence", None, 1.0, 1.05),
    "default": Setting(
        "dppo", {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}, "token", None, 1.0, 4.0
    ),
}
STEP = 1e-6


def mixed_batch() -> list[TokenSequence]:
    """Sequences whose tokens are of the rl, the ce and the ref_kl term, of several or of none; one is not sampled."""
    rng = random.Random(2)
    batch = []
    for index, tokens in enumerate(near_sequences()):
        logp, logq, adv = columns_of(tokens)
        batch.append(
            TokenSequence(
                logp=logp,
                logq=logq,
                adv=adv,
                sampled=[index != 2 and rng.random() < 0.7 for _ in tokens],
                rl_weights=[rng.choice([1.0, 0.5, 0.0]) for _ in tokens],
                ce_weights=[rng.choice([0.0, 0.0, 1.0, 0.25]) for _ in tokens],
                ref_kl_weights=[rng.choice([0.0, 0.3, 1.0]) for _ in tokens],
                ref=[value + rng.gauss(0.0, 0.5) for value in logp],
            )
        )
    return batch


BATCH = mixed_batch()


def objective_of(setting: Setting) -> Objective:
    return Objective(
        loss=functools.partial(LOSSES[setting.loss], **setting.parameters),
        normaliser=Normaliser(setting.normaliser),
        fixed_length=setting.fixed_length,
        ref_kl_tau=setting.ref_kl_tau,
        ref_kl_delta=setting.ref_kl_delta,
    )


def row_of(batch: list[TokenSequence]) -> RowTokens:
    def column(key: str) -> torch.Tensor:
        return torch.tensor([value for sequence in batch for value in getattr(sequence, key)], dtype=torch.float64)

    lengths = torch.tensor([len(sequence.logp) for sequence in batch])
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


def counts_of(batch: list[TokenSequence]) -> BatchCounts:
    return BatchCounts(
        rl_tokens=sum(sum(sequence.sampled) for sequence in batch),
        rl_sequences=sum(any(sequence.sampled) for sequence in batch),
        ce_tokens=sum(weight != 0 for sequence in batch for weight in sequence.ce_weights),
        ref_kl_tokens=sum(weight != 0 for sequence in batch for weight in sequence.ref_kl_weights),
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_add_up_to_the_papers_objective_and_gradient(name: str) -> None:
    expected, slopes = objective(SETTINGS[name], BATCH)
    total = 0.0
    gradient: list[float] = []
    for part in (BATCH[:3], BATCH[3:]):  # two micro-batches, the counts of both
        row = row_of(part)
        loss = objective_loss(objective_of(SETTINGS[name]), row, counts_of(BATCH)).total
        total += loss.item()
        gradient += torch.autograd.grad(loss, row.logprobs)[0].tolist()
    assert total == pytest.approx(expected, abs=1e-12)
    assert gradient == pytest.approx([slope for each in slopes for slope in each], abs=1e-12)


def test_the_batch_has_tokens_of_each_term_of_several_and_of_none() -> None:
    kinds = {
        (sampled, ce != 0, ref_kl != 0)
        for each in BATCH
        for sampled, ce, ref_kl in zip(each.sampled, each.ce_weights, each.ref_kl_weights, strict=True)
    }
    assert {(False, False, False), (True, False, False), (False, True, False), (False, False, True)} <= kinds
    assert (True, True, True) in kinds
    assert not any(BATCH[2].sampled)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_rl_gradient_matches_finite_differences_of_the_paper(name: str) -> None:
    none = [[0.0] * len(each.logp) for each in BATCH]
    batch = [replace(each, ce_weights=zeros, ref_kl_weights=zeros) for each, zeros in zip(BATCH, none, strict=True)]
    slopes = []
    for index, sequence in enumerate(batch):
        for at in range(len(sequence.logp)):
            values = []
            for step in (STEP, -STEP):
                moved = replace(sequence, logp=[value + step * (t == at) for t, value in enumerate(sequence.logp)])
                values.append(objective(SETTINGS[name], [*batch[:index], moved, *batch[index + 1 :]])[0])
            slopes.append((values[0] - values[1]) / (2 * STEP))
    row = row_of(batch)
    loss = objective_loss(objective_of(SETTINGS[name]), row, counts_of(batch)).total
    assert torch.autograd.grad(loss, row.logprobs)[0].tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)
