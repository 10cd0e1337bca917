"""Shared prompts on a GPU: the fused kernels give the logprobs and gradients of rows that repeat the prompt."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.attention import Kernels, choose_kernels
from meshrl.models.logprobs import PackedPolicy
from meshrl.training.learner import to_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).cuda().bfloat16()


def group(rng: np.random.Generator, prompt: int) -> list[TrainSample]:
    start = rng.integers(0, 512, prompt)
    samples = []
    for length in rng.integers(3, 900, 6):
        tokens = np.concatenate([start, rng.integers(0, 512, int(length))]).astype(np.int32)
        samples.append(
            TrainSample(
                token_ids=tokens,
                loss_mask=np.arange(len(tokens)) >= prompt,
                logprobs=np.zeros(len(tokens), np.float32),
                rollout_id=f"{prompt}-{length}",
                group=str(prompt),
            )
        )
    return samples


@pytest.mark.parametrize(
    ("long_from", "compiled"), [(None, False), (1024, False), (1, False), (None, True), (1024, True)]
)
def test_fused_kernels_share_a_prompt(long_from: int | None, compiled: bool) -> None:
    rng = np.random.default_rng(0)
    samples = [sample for prompt in (40, 700, 1500) for sample in group(rng, prompt)]
    found = []
    for share in (None, 0.0):
        policy = PackedPolicy(model(), device=torch.device("cuda"))
        default = choose_kernels("auto", torch.device("cuda"), torch.bfloat16)
        policy.kernels = default if long_from == 1024 else Kernels(fused=True, long_from=long_from)
        if compiled:
            for block in policy.model.model.layers:
                block.forward = torch.compile(block.forward)
        (row,) = pack_samples(samples, seq_len=32768, min_shared_prefix=share).micro_batches
        assert (row.shared_tokens > 0) == (share is not None)
        logprobs, _ = policy(to_row(row, torch.device("cuda"), policy.kernels))
        logprobs.mean().backward()
        ends = np.cumsum([int(part.sum()) for part in np.split(row.loss_mask, row.sample_offsets[1:-1])])
        pieces = torch.split(logprobs.detach().cpu(), np.diff([0, *ends]).tolist())
        by_rollout = dict(zip(row.rollout_ids, pieces, strict=True))
        gradients = {name: p.grad.float().cpu() for name, p in policy.model.named_parameters() if p.grad is not None}
        found.append((by_rollout, gradients))
    (repeated, expected), (shared, gradients) = found
    assert repeated.keys() == shared.keys()
    close = partial(torch.testing.assert_close, rtol=0.05, atol=0.05)
    for rollout, logprobs in repeated.items():
        close(shared[rollout], logprobs)
    for name, gradient in expected.items():
        apart = (gradients[name] - gradient).norm() / gradient.norm()
        assert apart < 0.05, f"{name}: {apart}"
