"""Packed rows give the numbers that each sample gives alone: logprobs, entropies and gradients."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from meshrl.models.attention import Kernels, PackedLayout
from meshrl.models.kernels.fused_attention import fused_attention
from meshrl.models.logprobs import PackedPolicy, PackedRow, _score, _slope, head_logprobs, token_logprobs
from meshrl.models.shared_prefix import PrefixPlan

LENGTHS = (7, 31, 2, 30, 12, 5, 1)
VOCAB = 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))
    if name == "qwen2-sliding":
        window = {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
        }
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": False}))
    if name == "gemma2-capped":
        return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, sliding_window=64))
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )


def tokens(rng: np.random.Generator) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.integers(0, VOCAB, length)) for length in LENGTHS]


def row_of(samples: list[torch.Tensor], temperatures: list[float]) -> PackedRow:
    lengths = [len(sample) for sample in samples]
    offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    predicted = (positions > 0).nonzero().squeeze(1)
    per_token = torch.tensor(temperatures).repeat_interleave(torch.tensor(lengths))
    return PackedRow(
        token_ids=torch.cat(samples),
        position_ids=positions,
        layout=PackedLayout.from_offsets(offsets, torch.device("cpu")),
        predicted=predicted,
        sources=predicted - 1,
        temperatures=per_token[predicted],
    )


def one_by_one(model: PreTrainedModel, samples: list[torch.Tensor], temperatures: list[float]) -> torch.Tensor:
    parts = []
    for sample, temperature in zip(samples, temperatures, strict=True):
        logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1] / temperature
        parts.append(torch.log_softmax(logits, -1).gather(1, sample[1:, None]).squeeze(1))
    return torch.cat(parts)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen2-sliding", "llama", "gemma2-capped", "gpt2"])
def test_packed_row_equals_samples_one_by_one(name: str) -> None:
    model = build(name).train()
    rng = np.random.default_rng(1)
    samples = tokens(rng)
    temperatures = rng.uniform(0.5, 1.5, len(samples)).astype(np.float32).tolist()
    weights = torch.from_numpy(rng.normal(size=sum(LENGTHS) - len(LENGTHS))).float()
    alone = one_by_one(model, samples, temperatures)
    (alone * weights).sum().backward()
    expected = gradients(model)

    policy = PackedPolicy(model)
    assert policy.packed
    together = policy(row_of(samples, temperatures))[0]
    (together * weights).sum().backward()

    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=2e-5, rtol=1e-4)


def test_logits_in_pieces_give_the_same_numbers_and_gradients() -> None:
    model = build("qwen3").train()
    row = row_of(tokens(np.random.default_rng(2)), [1.0] * len(LENGTHS))
    whole, whole_entropy = PackedPolicy(model)(row)
    whole.sum().backward()
    expected = gradients(model)
    pieces, pieces_entropy = PackedPolicy(model, max_logits_bytes=10 * VOCAB * 4)(row)
    pieces.sum().backward()
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(pieces_entropy, whole_entropy, atol=1e-6, rtol=0)
    for parameter, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("room", [1 << 20, 15 * 40 * 4, 5 * 40 * 4], ids=["all kept", "too little", "in pieces"])
@pytest.mark.parametrize("trained", ["head", "bias alone", "nothing"])
def test_gradients_of_logits_may_be_made_in_the_forward_pass(room: int, trained: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((13, 8), (40, 8), (40,)))
    targets = torch.randint(0, 40, (13,), generator=generator)
    temperatures, gradient = torch.rand(13, generator=generator) + 0.5, torch.randn(13, generator=generator)
    found, shapes = [], list[torch.Size]()

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    for slopes in (False, True):
        inputs = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
        inputs[1].requires_grad_(trained == "head")
        inputs[2].requires_grad_(trained != "nothing")
        shapes.clear()
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            outputs = head_logprobs(*inputs, targets, temperatures, max_logits_bytes=room, slopes=slopes)
        assert (torch.Size((13, 40)) in shapes) == (slopes and trained != "nothing" and room == 1 << 20)
        outputs[0].backward(gradient)
        found.append([*(each.detach() for each in outputs), *(each.grad for each in inputs if each.requires_grad)])
    for plain, ahead in zip(*found, strict=True):
        torch.testing.assert_close(ahead, plain, atol=1e-5, rtol=1e-5)


INTERPRETED = """
import sys
import torch
from meshrl.models.kernels import fused_head

results = []
for logits, targets, temperatures, wants_slope in torch.load(sys.argv[1]):
    found, slope = tuple(torch.empty(5) for _ in range(3)), torch.empty_like(logits) if wants_slope else None
    fused_head.score(logits, targets, temperatures, found, slope)
    results.append((*found, slope))
torch.save(results, sys.argv[1])
"""


def test_the_kernel_of_gpus_gives_the_same_numbers(tmp_path: Path) -> None:
    """Interpreted by triton, which must know before it is imported."""
    pytest.importorskip("triton", reason="comes with torch for GPUs")
    generator, cases = torch.Generator().manual_seed(0), []
    for vocab in (40, 4096, 5000):
        logits = 4 * torch.randn(5, vocab, generator=generator)
        logits[1, 7] = -torch.inf
        broken = logits.clone()
        broken[2, 9] = torch.nan
        given = torch.tensor([0, 3, vocab - 1, 5, 8]), torch.rand(5, generator=generator) + 0.5
        cases += [(logits, *given, True), (broken, *given, False)]
    torch.save(cases, tmp_path / "cases")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path / "cases")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "cases")
    for (logits, *given, _), (*sums, slope) in zip(cases[::2], found[::2], strict=True):
        expected = _score(logits, *given)
        slopes = _slope(logits, expected[2], *given, torch.ones(5), torch.float32)
        for own, other in zip((*sums, slope), (*expected, slopes), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    for logprobs, *_ in found[1::2]:
        assert logprobs.isnan().tolist() == [False, False, True, False, False]


def test_blocks_pad_no_sample_beyond_the_growth_bound() -> None:
    lengths = np.array([100, 70, 60, 20, 19, 3])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    layout = PackedLayout.from_offsets(offsets, torch.device("cpu"))
    assert [tuple(block.shape) for block in layout.blocks] == [(2, 100), (1, 60), (2, 20), (1, 3)]
    flat = torch.cat([block.flatten() for block in layout.blocks])
    assert flat[layout.scatter].tolist() == list(range(int(lengths.sum())))


def shapes_apart(value: object) -> object:
    """What torch.compile makes another graph for: everything but the sizes of tensors of two elements or more."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), tuple(size if size < 2 else "any" for size in value.shape)
    if dataclasses.is_dataclass(value):
        return {field.name: shapes_apart(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def test_rows_of_any_number_of_samples_are_one_shape_to_a_compiled_block() -> None:
    seen = []
    for lengths in ((300, 200), (100, 50, 20, 90, 40), (200,) * 7):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shared = np.array([0] + [10] * (len(lengths) - 1), np.int32)
        prefixes = PrefixPlan.from_samples(offsets, shared, np.zeros(len(lengths), np.int32), torch.device("cpu"))
        kernels = Kernels(fused=True, long_from=150)
        seen.append(shapes_apart(PackedLayout.from_offsets(offsets, torch.device("cpu"), kernels, prefixes)))
    assert seen[0] == seen[1] == seen[2]


def test_one_graph_serves_rows_of_any_number_of_samples() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor]]:
        graphs.append(graph)
        return lambda *_: (torch.zeros(()),)  # the kernels need a GPU; how often it is asked for them does not

    @torch.compile(backend=count, fullgraph=True)
    def attend(query_THD: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        assert layout.fused is not None
        return fused_attention(query_THD, query_THD, query_THD, layout.fused, scale=1.0, window=None).sum()

    query_THD = torch.zeros(256, 2, 8)
    for samples in (3, 5, 4, 7, 2, 9, 6, 1, 8, 12, 11):
        offsets = np.linspace(0, 256, samples + 1).astype(np.int64)
        attend(query_THD, PackedLayout.from_offsets(offsets, torch.device("cpu"), Kernels(fused=True, long_from=64)))
    assert len(graphs) == 1


def test_entropy_and_logprob_of_a_uniform_distribution() -> None:
    logprobs, entropy = token_logprobs(torch.zeros(2, 8), torch.tensor([0, 7]), torch.tensor([1.0, 0.3]))
    assert entropy.tolist() == pytest.approx([np.log(8)] * 2, rel=1e-6)
    assert logprobs.tolist() == pytest.approx([-np.log(8)] * 2, rel=1e-6)
