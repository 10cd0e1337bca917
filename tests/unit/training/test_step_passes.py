"""A group of one rank that shards, as on one GPU: parameters and gradients of a step without FSDP's copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from loss_curves import stream_batch
from meshrl.algorithms.losses import dppo_kl_loss
from meshrl.algorithms.objective import Objective
from meshrl.models.sharded import fill_part
from meshrl.models.state import published_tensors
from meshrl.training.build import build_learner
from meshrl.training.config import OptimConfig
from meshrl.training.learner import StepError
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from tiny_families import tiny_model
from tiny_qwen3 import SHAPE, save_tiny_qwen3
from trained import Trained

VOCAB = SHAPE["vocab_size"]


@pytest.fixture(scope="module")
def alone() -> Iterator[RankGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankGroup(mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def trained(model: str, group: RankGroup | None, **settings: object) -> Trained:
    config = TrainerModelConfig.model_validate({"name": model, "device": "cpu", **settings})
    return Trained.by(
        build_learner(config, parallel=group or RankGroup()),
        Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)),
        OptimConfig(lr=1e-2),
    )


def curve(one: Trained, steps: int = 2) -> list[tuple[float, float]]:
    made = [one.step(stream_batch(step, dp_size=1, vocab_size=VOCAB)) for step in range(steps)]
    return [(result.loss, result.grad_norm) for result in made]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "reshard_after_forward": False},
        {"dtype": "bfloat16", "reshard_after_forward": False, "ac": {}},
    ],
    ids=str,
)
def test_a_group_of_one_trains_as_fsdp_alone_would(settings: dict[str, object], model: str, alone: RankGroup) -> None:
    """Gradients are added in float32, in the order of the rows, either way: bit for bit. Their norm is not."""
    batch = stream_batch(0, dp_size=1, vocab_size=VOCAB)
    assert len(batch) > 2
    one, plain = trained(model, alone, **settings), trained(model, alone, **{**settings, "reshard_after_forward": True})
    plain.learner._passes = None
    for _ in range(2):  # the first pass of a unit is FSDP's
        for each in (one, plain):
            each.run.drop_gradient()
            each.pass_rows(batch)
    for ours, theirs in zip(one.run.parameters, plain.run.parameters, strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())
    for each in (one, plain):
        each.run.drop_gradient()
    for ours, theirs in zip(curve(one), curve(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_gradients_are_those_of_the_master_weights_after_each_call(model: str, alone: RankGroup) -> None:
    one = trained(model, alone, dtype="bfloat16", reshard_after_forward=False)
    batch = stream_batch(0, dp_size=1, vocab_size=VOCAB)
    one.learner.warm_up(batch)
    assert all(parameter.grad is None for parameter in one.model.parameters())
    sums = []
    for _ in range(2):
        one.pass_rows(batch)
        gradients = [parameter.grad for parameter in one.run.parameters]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        sums.append([gradient.full_tensor().clone() for gradient in gradients])
    assert all(torch.equal(twice, 2 * once) for once, twice in zip(*sums, strict=True))
    assert all(isinstance(parameter, DTensor) for parameter in one.model.parameters())  # the master weights


def test_a_failure_among_rows_leaves_nothing_behind(
    model: str, alone: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained(model, alone, dtype="bfloat16", reshard_after_forward=False)
    other = trained(model, alone, dtype="bfloat16", reshard_after_forward=False)
    curve(one, 1), curve(other, 1)
    forward, calls = one.learner._forward, []

    def failing(*args: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return forward(*args)

    monkeypatch.setattr(one.learner, "_forward", failing)
    with pytest.raises(StepError, match="out of memory"):
        one.step(stream_batch(7, dp_size=1, vocab_size=VOCAB))
    assert curve(one) == curve(other)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe", "minimax_m2"])
def test_routers_that_engines_compute_in_float32_are_float32_in_training_and_in_versions(
    family: str, alone: RankGroup, tmp_path: Path
) -> None:
    """Their weights are those of the optimizer, not rounded, so that nearly equal experts are told apart alike."""
    tiny_model(family, attn=None).save_pretrained(tmp_path)
    one = trained(str(tmp_path), alone, dtype="bfloat16")
    routers = {name: module for name, module in one.model.named_modules() if name.endswith("mlp.gate")}
    assert routers
    seen: dict[str, torch.Tensor] = {}

    def look(name: str, router: nn.Module, _: object) -> None:
        seen.setdefault(name, router.weight.detach().clone())

    for name, router in routers.items():
        router.register_forward_pre_hook(partial(look, name))
    masters = {name: router.weight.detach().full_tensor().clone() for name, router in routers.items()}
    with torch.no_grad():
        for name, master in masters.items():
            fill_part(routers[name].weight, master + 1e-4 * torch.rand_like(master))  # which bfloat16 cannot hold
            masters[name] = routers[name].weight.detach().full_tensor().clone()
    assert one.step(stream_batch(0, dp_size=1, vocab_size=VOCAB)).grad_norm > 0
    for name, master in masters.items():
        assert torch.equal(seen[name], master)
    published = {tensor.name: tensor.dtype for tensor in published_tensors(one.model, torch.bfloat16)}
    assert {published[f"{name}.weight"] for name in routers} == {torch.float32}
