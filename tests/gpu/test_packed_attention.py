"""On a GPU: packed rows through the variable-length kernel, and a step of a model in bfloat16 with float32 weights."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.attention import PackedLayout
from meshrl.models.logprobs import PackedPolicy, PackedRow
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (7, 130, 2, 64, 1, 300)
VOCAB = 64


def build(**settings: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **settings,
    )
    return Qwen3ForCausalLM(config).cuda()


def row(device: torch.device) -> tuple[list[torch.Tensor], PackedRow]:
    rng = np.random.default_rng(0)
    samples = [torch.from_numpy(rng.integers(0, VOCAB, length)).to(device) for length in LENGTHS]
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    predicted = (positions > 0).nonzero().squeeze(1)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    packed = PackedRow(
        token_ids=torch.cat(samples),
        position_ids=positions,
        layout=PackedLayout.from_offsets(offsets, device),
        predicted=predicted,
        temperatures=torch.ones(len(predicted), device=device),
    )
    return samples, packed


def one_by_one(model: Qwen3ForCausalLM, samples: list[torch.Tensor]) -> torch.Tensor:
    parts = []
    for sample in samples:
        logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1].float()
        parts.append(torch.log_softmax(logits, -1).gather(1, sample[1:, None]).squeeze(1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_packed_row_equals_samples_one_by_one(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    sliding = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    model = build(**sliding).to(dtype)
    samples, packed = row(model.device)
    alone = one_by_one(model, samples)
    alone.sum().backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.float().clone()
    model.zero_grad()
    together = PackedPolicy(model)(packed).logprobs
    together.sum().backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.float()
    torch.testing.assert_close(together, alone, atol=tolerance, rtol=0)
    assert (gradient - expected).norm() < 0.05 * expected.norm()


def test_step_in_bfloat16_learns_with_float32_weights() -> None:
    learner = Learner(
        build(),
        loss=cross_entropy_loss,
        optim=OptimConfig(lr=1e-3),
        scheduler=SchedulerConfig(),
        max_steps=None,
        compute_dtype=torch.bfloat16,
    )
    rng = np.random.default_rng(0)
    samples = [
        TrainSample(
            token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            logprobs=np.zeros(length, np.float32),
        )
        for length in (50, 90, 120)
    ]
    packing = pack_samples(samples, seq_len=256)
    losses = [learner.step(packing.micro_batches, loss_tokens=packing.loss_tokens).loss for _ in range(10)]
    assert losses[-1] < losses[0] - 0.3
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}
