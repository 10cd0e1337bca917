"""Router replay in the learner: rows that carry routes train on them, whatever else a row is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.routers import RouterChoice
from meshrl.training.config import OptimConfig
from meshrl.training.learner import UNREPLAYED_EVERY, Learner, to_row
from meshrl.training.model_config import AcMode, ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from meshrl.training.parallel.fsdp import prepare_blocks
from meshrl.training.run_state import TokenRecord
from meshrl.wire.types import MicroBatch
from meshrl.wire.types.routes import Routes, narrowed
from tiny_families import VOCAB, tiny_model
from trained import Trained

LENGTHS = (9, 5, 7)


def policy_of(
    family: str,
    ac: ActivationCheckpointConfig | None = None,
    *,
    compiled: CompileConfig | None = None,
    **changes: Any,
) -> PackedPolicy:
    policy = PackedPolicy(tiny_model(family, attn=None, **changes))
    prepare_blocks(policy, TrainerModelConfig(ac=ac, compile=compiled))
    return policy


def samples_of(
    routes: Sequence[Routes | None] = (None,) * len(LENGTHS), lengths: Sequence[int] = LENGTHS
) -> list[TrainSample]:
    numbers = np.random.default_rng(0)
    shared = numbers.integers(2, VOCAB, 4)
    made = []
    for length, own in zip(lengths, routes, strict=True):
        ids = np.concatenate([shared, numbers.integers(2, VOCAB, length - 4)]).astype(np.int32)
        mask = np.arange(length) >= 4
        logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
        made.append(TrainSample(token_ids=ids, loss_mask=mask, logprobs=logprobs, routed_experts=own, group="g"))
    return made


def rows_of(samples: Sequence[TrainSample], min_shared_prefix: float | None = None) -> Sequence[MicroBatch]:
    return pack_samples(samples, seq_len=512, min_shared_prefix=min_shared_prefix).micro_batches


def chosen_by(policy: PackedPolicy, samples: Sequence[TrainSample]) -> list[Routes]:
    """What the policy's routers choose for each sample, one forward pass a sample."""
    shape = policy.routers.shape
    assert shape is not None
    found = []
    for sample in samples:
        seen: list[RouterChoice] = []
        policy.routers.watchers.append(seen.append)
        (row,) = rows_of([sample])
        with torch.no_grad():
            policy(to_row(row, torch.device("cpu"), policy.kernels))
        policy.routers.watchers.remove(seen.append)
        routes = np.stack([choice.chosen.numpy() for choice in seen], axis=1)
        found.append(narrowed(routes, shape.experts))
    return found


def gradient(policy: PackedPolicy, row: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.model.zero_grad()
    logprobs, _ = policy(to_row(row, torch.device("cpu"), policy.kernels))
    logprobs.sum().backward()
    return logprobs.detach(), [each.grad.clone() for each in policy.model.parameters() if each.grad is not None]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
@pytest.mark.parametrize("prefixes", [None, 0.0], ids=["repeated", "shared"])
def test_routes_of_each_sample_reach_its_tokens_in_the_row(family: str, prefixes: float | None) -> None:
    """Packed, behind a shared prefix, and padded where a family cannot be packed (Qwen3.5)."""
    policy = policy_of(family)
    plain = samples_of()
    (row,) = rows_of(samples_of(chosen_by(policy, plain)), prefixes if policy.prefix_reason is None else None)
    assert row.routed_experts is not None
    assert len(row.routed_experts) == len(row.token_ids)
    free, free_gradients = gradient(policy, replace(row, routed_experts=None))
    replayed, gradients = gradient(policy, row)
    assert torch.equal(free, replayed)
    for one, other in zip(free_gradients, gradients, strict=True):
        if policy.packed:
            assert torch.equal(one, other)
        else:  # padding goes through other experts than before, which sum in another order
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)

    moved = [narrowed((routes.astype(int) + 1) % 4, 4) for routes in chosen_by(policy, plain)]
    (row,) = rows_of(samples_of(moved), prefixes if policy.prefix_reason is None else None)
    other, _ = gradient(policy, row)
    alone = [gradient(policy, rows_of([sample])[0])[0] for sample in samples_of(moved)]
    assert not torch.allclose(free, other, atol=1e-3)
    torch.testing.assert_close(other, torch.cat(alone), atol=2e-5, rtol=1e-4)


def test_blocks_that_are_computed_again_replay_the_routes_of_their_first_pass() -> None:
    kept, again = policy_of("qwen3_moe"), policy_of("qwen3_moe", ActivationCheckpointConfig(mode="full"))
    moved = [narrowed((routes.astype(int) + 1) % 4, 4) for routes in chosen_by(kept, samples_of())]
    (row,) = rows_of(samples_of(moved))
    for one, other in zip(gradient(kept, row)[1], gradient(again, row)[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", [None, "full", "attention", "selective"])
def test_compiled_blocks_leave_their_experts_out_and_replay_as_others_do(mode: AcMode | None) -> None:
    torch._dynamo.reset()
    counters.clear()
    ac = None if mode is None else ActivationCheckpointConfig(mode=mode)
    plain, compiled = policy_of("qwen3_moe"), policy_of("qwen3_moe", ac, compiled=CompileConfig(backend="aot_eager"))
    moved = [narrowed((routes.astype(int) + 1) % 4, 4) for routes in chosen_by(plain, samples_of())]
    (row,) = rows_of(samples_of(moved))
    seen: list[RouterChoice] = []
    compiled.routers.watchers.append(seen.append)
    for one, other in zip(gradient(plain, row)[1], gradient(compiled, row)[1], strict=True):
        torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] >= 4  # of two blocks
    assert [choice.router for choice in seen] == ([0, 1] if ac is None else [0, 1, 1, 0])
    assert all(torch.equal(choice.chosen, choice.given) for choice in seen)


def test_a_mixture_is_no_whole_graph() -> None:
    with pytest.raises(ValueError, match=r"model\.compile\.fullgraph"):
        policy_of("mixtral", compiled=CompileConfig(backend="aot_eager", fullgraph=True))


def trained_on(family: str, **changes: Any) -> Trained:
    return Trained.by(Learner(policy_of(family, **changes)), Objective(loss=cross_entropy_loss), OptimConfig(lr=1e-12))


def mismatch(tokens: TokenRecord) -> float:
    log_ratio = tokens.logprobs.astype(np.float64) - tokens.inference_logprobs
    return float((np.exp(log_ratio) - log_ratio - 1.0).mean())


@pytest.mark.parametrize(
    ("family", "experts"),
    [("qwen3_moe", "num_experts"), ("deepseek_v3", "n_routed_experts"), ("mixtral", "num_local_experts")],
)
def test_a_perturbed_router_differs_less_from_the_engine_with_replay(family: str, experts: str) -> None:
    """The engine is the model itself, in float32; the trainer's routers are off by a hundredth of their weights."""
    many = {experts: 32}  # whose scores lie close together
    engine, lengths = policy_of(family, **many), [100, 90, 110]
    routes = chosen_by(engine, samples_of(lengths=lengths))
    sampled = []
    for sample in samples_of(routes, lengths):
        (row,) = rows_of([sample])
        with torch.no_grad():
            logprobs, _ = engine(to_row(row, torch.device("cpu"), engine.kernels))
        told = sample.logprobs.copy()
        told[sample.loss_mask] = logprobs.numpy()
        sampled.append(replace(sample, logprobs=told))
    (row,) = rows_of(sampled)

    trained = trained_on(family, **many)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trained.model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data += 0.01 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    without = trained.step([replace(row, routed_experts=None)])
    assert "router_replay_changed/mean" not in without.routing
    replayed = trained.step([row])
    assert mismatch(without.tokens) > 5 * mismatch(replayed.tokens)
    assert replayed.routing["router_replay_tokens/mean"] == 1.0
    assert 0.0 < replayed.routing["router_replay_changed/mean"] < 1.0

    while trained.run.next_step % UNREPLAYED_EVERY:
        trained.step([row])
    measured = trained.step([row]).routing["router_replay_mismatch_kl/mean"]
    assert measured == pytest.approx(mismatch(without.tokens), rel=1e-3)


def test_tokens_without_routes_are_the_trainers_own_to_route() -> None:
    trained = trained_on("qwen3_moe")
    known = chosen_by(trained.learner.policy, samples_of())
    (row,) = rows_of(samples_of([known[0], None, known[2]]))
    result = trained.step([row])
    assert result.routing["router_replay_tokens/mean"] == pytest.approx((LENGTHS[0] + LENGTHS[2]) / sum(LENGTHS))
    assert result.routing["router_replay_changed/mean"] == 0.0
