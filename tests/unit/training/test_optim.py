"""Each optimizer against its formula, and what is measured on gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshrl.training import optim
from meshrl.training.config import OptimConfig
from meshrl.training.optim import HostCopies, Optimizer, build_optimizer, clip_gradients, gradient_zeros


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, **shape)
    )


def trained(config: OptimConfig, *, cpu_offload: bool = False, steps: int = 3) -> tuple[Qwen3ForCausalLM, Optimizer]:
    net = model()
    optimizer = build_optimizer(net, config, cpu_offload=cpu_offload)
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        optimizer.step(config.lr)
        optimizer.zero_grad()
    return net, optimizer


def test_adamw_takes_the_step_of_its_formula() -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.5, eps=1e-8)
    net, _ = trained(config, steps=1)
    before = model()
    source = torch.Generator().manual_seed(0)
    for (name, parameter), old in zip(net.named_parameters(), before.parameters(), strict=True):
        gradient = torch.randn(parameter.shape, generator=source)
        decayed = old * (1 - 0.1 * (0.5 if old.ndim >= 2 else 0.0))
        expected = decayed - 0.1 * gradient / (gradient.abs() + 1e-8)  # first step: both moments are unbiased
        torch.testing.assert_close(parameter, expected, atol=1e-5, rtol=1e-4, msg=name)


def test_sgd_takes_the_step_of_its_formula() -> None:
    net, _ = trained(OptimConfig(type="sgd", lr=0.1, weight_decay=0.0, momentum=0.5), steps=2)
    sources = [torch.Generator().manual_seed(step) for step in range(2)]
    for parameter, old in zip(net.parameters(), model().parameters(), strict=True):
        first, second = (torch.randn(old.shape, generator=source) for source in sources)
        torch.testing.assert_close(parameter.data, old - 0.1 * first - 0.1 * (0.5 * first + second))


def test_muon_makes_the_steps_of_matrices_orthogonal_and_leaves_the_ends_to_adamw() -> None:
    net, optimizer = trained(OptimConfig(type="muon", lr=0.1, weight_decay=0.0), steps=1)
    muon = [part for part in optimizer.parts if isinstance(part, torch.optim.Muon)]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    matrices = {names[id(p)] for part in muon for group in part.param_groups for p in group["params"]}
    assert all("proj" in name for name in matrices)
    assert len(matrices) == 7
    assert "model.embed_tokens.weight" not in matrices
    old = dict(model().named_parameters())
    for name in matrices:
        step = (net.get_parameter(name) - old[name]).detach()
        singular = torch.linalg.svdvals(step) / (0.1 * 0.2 * max(step.shape) ** 0.5)
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3  # all alike, of the size of AdamW's steps


def test_state_on_the_host_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "OFFLOAD_PART_NUMEL", 600)
    for kind in ("adamw", "muon", "sgd"):
        config = OptimConfig(type=kind, lr=0.01)
        plain, one = trained(config)
        offloaded, several = trained(config, cpu_offload=True)
        assert len(several.parts) > len(one.parts)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, offloaded.get_parameter(name)), name


def test_state_is_gone_from_the_device_between_steps_and_there_when_asked_for() -> None:
    _, optimizer = trained(OptimConfig(lr=0.01), cpu_offload=True)
    _, plain = trained(OptimConfig(lr=0.01))
    moments = [state["exp_avg"] for part in optimizer.parts for state in part.state.values()]
    assert {moment.untyped_storage().nbytes() for moment in moments} == {0}
    with optimizer.on_device():
        expected = [state["exp_avg"] for part in plain.parts for state in part.state.values()]
        assert sum(float(m.double().sum()) for m in moments) == pytest.approx(
            sum(float(m.double().sum()) for m in expected), rel=1e-12
        )
    assert {moment.untyped_storage().nbytes() for moment in moments} == {0}


def test_a_tensor_comes_back_as_it_was() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0)
    copies.take([tensor])
    copies.restore([tensor])
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_are_clipped_to_a_global_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    np.testing.assert_array_equal(gradient_zeros(parameters), [4, 6])
    assert clip_gradients(parameters, None) == pytest.approx(5.0)
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert clip_gradients(parameters, 1.0) == pytest.approx(1.0, rel=1e-5)
    parameters[0].grad[0] = float("nan")
    assert np.isnan(clip_gradients(parameters, 1.0))
    assert parameters[1].grad[1] == pytest.approx(0.8, rel=1e-5)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model().requires_grad_(False), OptimConfig())
