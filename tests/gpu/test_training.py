"""On a GPU: packed rows through each kernel, and sharded steps in bfloat16 with float32 weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.models.attention import AttentionName, Kernels, PackedLayout
from meshrl.models.logprobs import PackedPolicy, PackedRow, head_logprobs
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.training.build import build_learner
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.wire.types import MicroBatch
from tiny_qwen3 import FOR_A_GPU, save_tiny_qwen3, tiny_qwen3
from trained import Trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (7, 1300, 2, 64, 1, 1024, 300)  # some short, some through cuDNN, padded and not
VOCAB = FOR_A_GPU["vocab_size"]


def build(**settings: object) -> Qwen3ForCausalLM:
    return tiny_qwen3(**{**FOR_A_GPU, **settings}).cuda()


def row(device: torch.device, kernels: Kernels) -> tuple[list[torch.Tensor], PackedRow]:
    rng = np.random.default_rng(0)
    samples = [torch.from_numpy(rng.integers(0, VOCAB, length)).to(device) for length in LENGTHS]
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    predicted = (positions > 0).nonzero().squeeze(1)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    packed = PackedRow(
        token_ids=torch.cat(samples),
        position_ids=positions,
        layout=PackedLayout.from_offsets(offsets, device, kernels),
        predicted=predicted,
        sources=predicted - 1,
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
@pytest.mark.parametrize(
    ("dtype", "attn", "tolerance"),
    [
        (torch.float32, "auto", 1e-4),
        (torch.bfloat16, "auto", 3e-2),
        (torch.bfloat16, "varlen", 3e-2),
        (torch.bfloat16, "cudnn", 3e-2),
        (torch.bfloat16, "sdpa", 3e-2),
    ],
)
def test_packed_row_equals_samples_one_by_one(
    dtype: torch.dtype, attn: AttentionName, tolerance: float, window: int | None
) -> None:
    sliding = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    model = build(**sliding).to(dtype)
    policy = PackedPolicy(build(**sliding).to(dtype), attn=attn, compute_dtype=dtype, autocast=False)
    samples, packed = row(model.device, policy.kernels)
    alone = one_by_one(model, samples)
    alone.sum().backward()
    together, _ = policy(packed)
    together.sum().backward()
    torch.testing.assert_close(together, alone, atol=tolerance, rtol=0)
    for name, parameter in model.named_parameters():
        expected, gradient = parameter.grad.float(), policy.model.get_parameter(name).grad.float()
        assert (gradient - expected).norm() < 0.05 * expected.norm(), name


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("slopes", [True, False])
def test_the_compiled_head_equals_float32(slopes: bool, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshrl.models.kernels import fused_head  # needs a GPU

    score, passed = fused_head.score, []

    def noted(logits: torch.Tensor, *others: Any) -> None:
        targets, temperatures, results, slope = others
        passed.append([logits, targets, temperatures, *results, *([] if slope is None else [slope])])
        score(logits, *others)

    monkeypatch.setattr(fused_head, "score", noted)
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=generator, device="cuda") for n in (700, 5000))
    targets = torch.randint(0, 5000, (700,), generator=generator, device="cuda")
    temperatures, gradient = (torch.rand(700, generator=generator, device="cuda") + 0.5 for _ in range(2))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [(0.2 * hidden).to(dtype).requires_grad_(), (0.2 * weight).to(dtype).requires_grad_(trained)]
        half = dtype is torch.bfloat16
        room = int((2.52 if slopes else 1.0) * 700 * 5000)  # bytes for several pieces of 4 a logit, kept ones take 2
        outputs = head_logprobs(
            *inputs, None, targets, temperatures, max_logits_bytes=room, compiled=half, slopes=half and slopes
        )
        outputs[0].backward(gradient)
        found.append(
            [
                *(each.detach() for each in outputs),
                *(each.grad.float() for each in inputs if trained or each is inputs[0]),
            ]
        )
    for exact, own in zip(*found, strict=True):
        assert (own - exact).norm() < 0.02 * exact.norm()
    assert len(passed) > 1
    assert {tensor.data_ptr() % 16 for tensors in passed for tensor in tensors} == {0}  # else triton compiles again


def batch(dp_size: int = 1) -> tuple[MicroBatch, ...]:
    bench = BenchConfig(rows=2, lengths="variable", median_length=900)
    return fake_batch(bench, seq_len=4096, vocab_size=VOCAB, dp_size=dp_size, seed=0)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    parallel = RankGroup.start({}, device=torch.device("cuda"))
    yield parallel
    parallel.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), **FOR_A_GPU)


@pytest.fixture(scope="module")
def expected(group: RankGroup, model: str) -> list[float]:
    found = losses(model, group, {})
    assert found[-1] < found[0] - 0.02
    return found


def losses(model: str, group: RankGroup, settings: dict[str, object]) -> list[float]:
    config = TrainerModelConfig.model_validate({"name": model, "dtype": "bfloat16", **settings})
    trained = Trained.by(
        build_learner(config, parallel=group),
        Objective(loss=cross_entropy_loss),
        OptimConfig(lr=1e-3),
    )
    found = [trained.step(batch()).loss for _ in range(4)]
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"ac": {}},
        {"ac": {"mode": "selective"}},
        {"ac": {"freq": 2}, "ac_offloading": {"min_mib": 0.001}},
        {"ac": {}, "ac_offloading": {"min_mib": 0.001}, "compile": {"fullgraph": True}},
        {"compile": {"fullgraph": True}},
        {"compile": {"fullgraph": True}, "ac": {"mode": "selective"}},
        {"reshard_after_forward": False},
        {"reshard_after_forward": False, "pass_tokens": 8192},
        {"optim_cpu_offload": True},
        {"fsdp_cpu_offload": True},
    ],
    ids=str,
)
def test_what_saves_memory_or_time_changes_no_number(
    settings: dict[str, object], group: RankGroup, model: str, expected: list[float]
) -> None:
    assert losses(model, group, settings) == pytest.approx(expected, rel=2e-3)


def test_rows_of_any_number_of_samples_need_no_new_graphs(group: RankGroup, model: str) -> None:
    """fullgraph makes torch.compile raise where it would give up on a block that it has compiled too often."""
    config = TrainerModelConfig.model_validate(
        {"name": model, "dtype": "bfloat16", "compile": {"fullgraph": True}, "ac": {"mode": "selective"}}
    )
    trained = Trained.by(
        build_learner(config, parallel=group),
        Objective(loss=cross_entropy_loss),
        OptimConfig(lr=1e-3),
    )
    numbers = []
    for seed, median_length in enumerate((100, 200, 300, 500, 900, 1500) * 2):
        bench = BenchConfig(rows=1, lengths="variable", median_length=median_length)
        made = fake_batch(bench, seq_len=4096, vocab_size=VOCAB, dp_size=1, seed=seed)
        numbers.append(len(made[0].sample_offsets))
        assert np.isfinite(trained.step(made).loss)
    assert len(set(numbers)) > 8  # dynamo's recompile_limit
