"""The KL to a teacher over its likeliest tokens: packed and trained, against autograd of the plain formula."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective, count, objective_loss
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.training.learner import to_row, to_tokens
from tiny_qwen3 import tiny_qwen3

VOCAB, TAU, CPU = 16, 0.5, torch.device("cpu")


def model(seed: int) -> Qwen3ForCausalLM:
    return tiny_qwen3(seed, vocab_size=VOCAB, initializer_range=0.5)


def logprobs_of(policy: Qwen3ForCausalLM, token_ids: np.ndarray) -> torch.Tensor:
    """(T, V) of what follows the tokens before each; of the first any."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    logprobs_TV = policy(ids[None]).logits[0].double().log_softmax(-1)
    return torch.cat([logprobs_TV[:1], logprobs_TV[:-1]])


def taught(seed: int, top_k: int) -> TrainSample:
    """Nine tokens, of which the last six are the policy's, with a teacher's `top_k` likeliest tokens for each."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, VOCAB, 9).astype(np.int32)
    with torch.no_grad():
        reference_TV = logprobs_of(model(1), token_ids)
    tops = reference_TV.topk(top_k)
    return TrainSample(
        token_ids=token_ids,
        loss_mask=np.zeros(9, dtype=np.bool_),
        logprobs=-rng.exponential(size=9).astype(np.float32),
        ref_kl_weights=np.where(np.arange(9) >= 3, rng.uniform(0.5, 2.0, 9), 0.0).astype(np.float32),
        ref_logprobs=reference_TV[range(9), token_ids].numpy().astype(np.float32),
        ref_top_ids=tops.indices.numpy().astype(np.int32),
        ref_top_logprobs=tops.values.numpy().astype(np.float32),
        rollout_id=str(seed),
    )


def over_the_vocabulary(policy: Qwen3ForCausalLM, sample: TrainSample, top_k: int) -> torch.Tensor:
    """The weighted sum of KL(p || ref) of the sample's tokens, all but the teacher's `top_k` taken as one token."""
    logp_TV = logprobs_of(policy, sample.token_ids)
    with torch.no_grad():
        reference_TV = logprobs_of(model(1), sample.token_ids)
    total = torch.zeros((), dtype=torch.float64)
    for t in np.flatnonzero(sample.ref_kl_weights):
        kept = reference_TV[t].topk(top_k).indices
        others = [token for token in range(VOCAB) if token not in kept]
        p, ref = (
            torch.cat([each[kept].exp(), each[others].exp().sum()[None]]) for each in (logp_TV[t], reference_TV[t])
        )
        terms = (p * (p / ref).log())[: top_k + bool(others)]
        total = total + float(sample.ref_kl_weights[t]) * terms.sum()
    return total


@pytest.mark.parametrize("max_logits_bytes", [1 << 28, 3 * VOCAB * 4], ids=["whole", "in-pieces"])
@pytest.mark.parametrize("top_k", [1, 5, VOCAB])
def test_loss_and_gradient_are_those_of_the_kl_over_the_vocabulary(top_k: int, max_logits_bytes: int) -> None:
    samples = [taught(seed, top_k) for seed in (3, 4)]
    (row,) = pack_samples(samples, seq_len=32).micro_batches
    trained = model(0)
    policy = PackedPolicy(trained, max_logits_bytes=max_logits_bytes)
    tokens = to_tokens(row, policy(to_row(row, CPU, policy.kernels))[0])
    objective = Objective(loss=cross_entropy_loss, ref_kl_tau=TAU)
    loss = objective_loss(objective, tokens, count([row]))
    torch.autograd.backward(loss.total)
    plain = model(0)
    expected = TAU * sum(over_the_vocabulary(plain, sample, top_k) for sample in samples) / 12
    torch.autograd.backward(expected)
    assert loss.metrics["ref_kl"].item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, found), wanted in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, wanted.grad, rtol=1e-4, atol=1e-6, msg=lambda said, of=name: f"{of}: {said}"
        )


def test_a_token_without_candidates_is_still_sampled() -> None:
    """A row may hold samples of a teacher that gave fewer candidates, or none."""
    wide, narrow = taught(3, 5), taught(4, 2)
    bare = replace(taught(5, 1), ref_top_ids=None, ref_top_logprobs=None)
    policy = PackedPolicy(model(0))

    def ref_kl(samples: list[TrainSample]) -> float:
        (row,) = pack_samples(samples, seq_len=32).micro_batches
        tokens = to_tokens(row, policy(to_row(row, CPU, policy.kernels))[0])
        return float(objective_loss(Objective(loss=cross_entropy_loss), tokens, count([row])).metrics["ref_kl"])

    alone = [ref_kl([sample]) for sample in (wide, narrow, bare)]
    assert min(alone) > 0.0
    assert ref_kl([wide, narrow, bare]) == pytest.approx(sum(alone) / 3, rel=1e-5)
