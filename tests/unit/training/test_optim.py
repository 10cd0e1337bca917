"""Each optimizer against its formula, and what is measured on gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import Qwen3ForCausalLM

from meshrl.training import optim
from meshrl.training.config import OptimConfig
from meshrl.training.muon import Muon
from meshrl.training.optim import Optimizer, build_optimizer, clip_gradients, gradient_zeros
from tiny_qwen3 import tiny_qwen3


def model() -> Qwen3ForCausalLM:
    return tiny_qwen3(vocab_size=20, intermediate_size=24)


def trained(config: OptimConfig, *, cpu_offload: bool = False, steps: int = 3) -> tuple[Qwen3ForCausalLM, Optimizer]:
    net = model()
    optimizer = build_optimizer(net, config, cpu_offload=cpu_offload)
    train(net, optimizer, config, range(steps))
    return net, optimizer


def train(net: nn.Module, optimizer: Optimizer, config: OptimConfig, steps: Iterable[int]) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        optimizer.step(config.lr)
        optimizer.zero_grad()


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    states = [state for part in optimizer.parts for state in part.state.values()]
    return [tensor for state in states for name, tensor in state.items() if name != "step"]


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
    muon = [part for part in optimizer.parts if isinstance(part, Muon)]
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


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_muon_takes_the_steps_of_torchs_own(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    mine, its = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([mine], lr=0.1, weight_decay=0.3, momentum=0.9)
    other = torch.optim.Muon([its], lr=0.1, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        mine.grad = torch.randn(shape)
        its.grad = mine.grad.clone()
        muon.step()
        other.step()
        assert torch.equal(mine, its)


def test_muon_is_for_matrices() -> None:
    with pytest.raises(ValueError, match=r"matrices, got a parameter of shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1, weight_decay=0.0, momentum=0.9)


def test_state_on_the_host_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "OFFLOAD_PART_NUMEL", 600)
    for kind in ("adamw", "muon", "sgd"):
        config = OptimConfig(type=kind, lr=0.01)
        plain, one = trained(config)
        offloaded, several = trained(config, cpu_offload=True)
        assert len(several.parts) > len(one.parts)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, offloaded.get_parameter(name)), name


def test_state_that_a_checkpoint_replaces_is_what_training_goes_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "OFFLOAD_PART_NUMEL", 600)
    config = OptimConfig(type="muon", lr=0.01)
    straight, _ = trained(config, steps=5)
    net, optimizer = trained(config, cpu_offload=True, steps=3)
    with optimizer.state_open():
        weights, state = get_state_dict(net, optimizer.parts)
        weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    other = model()
    fresh = build_optimizer(other, config, cpu_offload=True)
    with fresh.state_open():
        set_state_dict(other, fresh.parts, model_state_dict=weights, optim_state_dict=state)
    train(other, fresh, config, range(3, 5))
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_a_step_reads_and_writes_the_state_on_the_host_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "OFFLOAD_PART_NUMEL", 600)
    net, optimizer = trained(OptimConfig(lr=0.01), cpu_offload=True, steps=1)
    kept = [(tensor, tensor.clone()) for tensor in moments(optimizer)]
    beside: list[int] = []
    for part in optimizer.parts:
        part.register_step_pre_hook(lambda *_: beside.append(len(own & {id(t) for t in moments(optimizer)})))
    own = {id(tensor) for tensor, _ in kept}
    train(net, optimizer, OptimConfig(lr=0.01), range(1, 2))
    sizes = [2 * sum(len(group["params"]) for group in part.param_groups) for part in optimizer.parts]
    assert beside == [len(kept) - size for size in sizes]  # all but the part's own are where they were
    assert {id(tensor) for tensor in moments(optimizer)} == own
    assert not any(torch.equal(tensor, before) for tensor, before in kept)


def test_gradients_are_clipped_to_a_global_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert [float(count) for count in gradient_zeros(parameters)] == [4, 6]
    assert clip_gradients(parameters, None) == pytest.approx(5.0)
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert clip_gradients(parameters, 1.0) == pytest.approx(1.0, rel=1e-5)
    parameters[0].grad[0] = float("nan")
    assert np.isnan(clip_gradients(parameters, 1.0))
    assert parameters[1].grad[1] == pytest.approx(0.8, rel=1e-5)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model().requires_grad_(False), OptimConfig())
