"""rl, ce and ref_kl in one batch: packed, sent over the wire, trained; against a plain forward pass a sample."""

import math

import numpy as np
import pytest
import torch

from meshrl.algorithms.losses import aipo_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.trainer.metrics import step_metrics
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner, StepResult
from meshrl.wire import convert
from meshrl.wire.types import Batch
from tiny_qwen3 import tiny_qwen3
from trained import Trained

VOCAB, DELTA, TAU = 16, 2.0, 0.5


def trained(samples: list[TrainSample], *, seq_len: int = 24) -> StepResult:
    packing = pack_samples(samples, seq_len=seq_len)
    batch = Batch(
        run_id="r", step=1, micro_batches=packing.micro_batches, loss_tokens=packing.loss_tokens, environments=("e",)
    )
    reader = convert.BatchReader(seq_len=seq_len)
    for message in convert.batch_to_messages(batch):
        reader.feed(message)
    trained = Trained.by(
        Learner(PackedPolicy(tiny_qwen3(vocab_size=VOCAB))),
        Objective(loss=lambda inputs: aipo_loss(inputs, delta=DELTA), ref_kl_tau=TAU, ref_kl_delta=3.0),
        OptimConfig(lr=1e-2),
    )
    return trained.step(reader.finish().micro_batches)


def sample(seed: int, *, rl: bool = True, **terms: bool) -> TrainSample:
    """Ten tokens: a prompt, tokens 2 to 5 sampled, tokens 6 to 9 observed."""
    rng = np.random.default_rng(seed)
    place = np.arange(10)
    sampled = (place >= 2) & (place < 6)
    observed = np.where(place >= 6, rng.uniform(0.5, 2.0, 10), 0.0).astype(np.float32)
    everywhere = np.where(place >= 2, rng.uniform(0.5, 2.0, 10), 0.0).astype(np.float32)
    return TrainSample(
        token_ids=rng.integers(0, VOCAB, 10).astype(np.int32),
        loss_mask=sampled & rl,
        logprobs=np.where(sampled, -rng.exponential(size=10), 0.0).astype(np.float32),
        advantage=float(rng.normal()),
        rollout_id=str(seed),
        rl_weights=rng.uniform(0.5, 2.0, 10).astype(np.float32) if terms.get("weighted") else None,
        ce_weights=observed if terms.get("ce") else None,
        ref_kl_weights=everywhere if terms.get("ref") else None,
        ref_logprobs=-rng.exponential(size=10).astype(np.float32) if terms.get("ref") else None,
    )


def expected(samples: list[TrainSample]) -> dict[str, float]:
    """Each term by its formula, in float64, over logprobs of one plain forward pass a sample."""
    plain = tiny_qwen3(vocab_size=VOCAB)
    sums, counts = dict.fromkeys(("rl", "ce", "ref_kl"), 0.0), dict.fromkeys(("rl", "ce", "ref_kl"), 0)
    for each in samples:
        ids = torch.from_numpy(each.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = plain(ids[None]).logits[0, :-1].double()
        logp = [0.0, *logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()]
        for t in range(1, len(ids)):
            ratio = math.exp(logp[t] - each.logprobs[t])
            if each.loss_mask[t]:
                weight = 1.0 if each.rl_weights is None else float(each.rl_weights[t])
                sums["rl"] += weight * -min(ratio, DELTA) * each.advantage * logp[t]
                counts["rl"] += 1
            if each.ce_weights is not None and each.ce_weights[t]:
                sums["ce"] -= float(each.ce_weights[t]) * logp[t]
                counts["ce"] += 1
            if each.ref_kl_weights is not None and each.ref_kl_weights[t]:
                corrected = min(ratio, 3.0) if each.logprobs[t] else 1.0
                distance = (logp[t] - float(each.ref_logprobs[t])) ** 2 / 2
                sums["ref_kl"] += TAU * float(each.ref_kl_weights[t]) * corrected * distance
                counts["ref_kl"] += 1
    return {name: sums[name] / counts[name] for name in sums if counts[name]}


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([sample(1), sample(2), sample(3)], id="rl"),
        pytest.param([sample(1, weighted=True), sample(2)], id="weighted rl"),
        pytest.param([sample(1, rl=False, ce=True), sample(2, rl=False, ce=True)], id="ce alone"),
        pytest.param([sample(1, rl=False, ref=True)], id="ref_kl alone"),
        pytest.param(
            [sample(1, ce=True), sample(2), sample(3, rl=False, ce=True, ref=True)], id="all, in some samples"
        ),
        pytest.param([sample(s, ce=True, ref=True, weighted=True) for s in range(5)], id="all, in every sample"),
    ],
)
def test_the_loss_is_the_sum_of_the_terms_over_their_own_counts(samples: list[TrainSample]) -> None:
    result, terms = trained(samples), expected(samples)
    assert {name: result.metrics[name] for name in terms} == pytest.approx(terms, rel=1e-4)
    assert {"rl", "ce", "ref_kl"} & set(result.metrics) == set(terms)
    assert result.loss == pytest.approx(sum(terms.values()), rel=1e-4)
    assert len(result.tokens.logprobs) == sum(int(each.loss_mask.sum()) for each in samples)
    assert all(math.isfinite(value) for value in step_metrics(result, ["e"]).values())
