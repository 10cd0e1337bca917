"""Algorithms by environment in one run: what the trainer gets of each row, over real gRPC."""

from dataclasses import replace

import numpy as np
import pytest

from meshrl.orchestrator.config import TrainEnvConfig, TrainEnvsConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import MessageSpan, Rollout, RolloutRequest
from scripted_services import samples_of

TOOL = (MessageSpan(start=0, end=1, role="user"), MessageSpan(start=1, end=2, role="tool"))


def environments(**algorithms: dict) -> TrainEnvsConfig:
    return TrainEnvsConfig(
        env=[TrainEnvConfig.model_validate({"id": name, "algo": algo}) for name, algo in algorithms.items()]
    )


async def test_environments_of_one_run_train_by_their_own_algorithm(mesh, script, batches, make_config, start) -> None:
    script.environments = {"plain": 50, "tools": 50, "mine": 50}

    def with_tool(request: RolloutRequest, place: int, rollout: Rollout) -> Rollout:
        return replace(rollout, samples=(replace(rollout.samples[0], message_spans=TOOL),))

    script.alter = with_tool
    train = environments(
        plain={"type": "grpo"},
        tools={"type": "echo", "weight": 0.25},
        mine={"type": "custom", "import_path": "custom_functions.Imitate", "kwargs": {"least": 1.0}},
    )
    config = make_config(mesh.services, train=train, batch_size=24, max_steps=2, max_async_level=0)
    async with start(config) as (loop, journal):
        await loop.train()
    acted, nothing = [False, False, True, True, True], [False] * 5
    logprobs = [0, 0, -0.5, -0.5, -0.5]
    seen = {name: [] for name in script.environments}
    for name, sample in samples_of(batches):
        seen[name].append(sample["advantages"][-1])
        assert sample["ref_kl_weights"] is None
        if name == "mine":  # what got less than 1 trains nothing and is not in the batch
            assert (sample["loss_mask"], sample["advantages"]) == (nothing, [0.0] * 5)
            assert (sample["ce_weights"], sample["inference_logprobs"]) == ([0, 0, 1, 1, 1], [0.0] * 5)
        else:
            observed = 0.25 if name == "tools" else 0.0
            assert (sample["loss_mask"], sample["inference_logprobs"]) == (acted, logprobs)
            assert (sample["ce_weights"] or [0.0] * 5) == [0, observed, 0, 0, 0]
    assert sorted(seen["plain"]) == sorted(seen["tools"]) == [-0.5] * 8 + [0.5] * 8
    assert len(seen["mine"]) == 8
    assert journal.ledger.balance().trained == 40


async def test_baselines_of_self_play_survive_the_orchestrator(mesh, script, batches, make_config, start) -> None:
    script.reward = lambda request, place: (1.0, 0.0, 0.5, 0.25)[place]  # in whatever order groups come
    script.alter = lambda request, place, rollout: replace(rollout, agent="white" if place % 2 else "black")
    train = environments(echo={"type": "rae", "decay": 0.5})
    config = make_config(mesh.services, train=train, max_steps=2)
    async with start(config) as (loop, journal):
        await loop.train()
        state = journal.algorithms(2)
    assert set(state["echo"]) == {"white", "black"}
    async with start(make_config(mesh.services, train=train, max_steps=3)) as (loop, journal):
        assert journal.algorithms(2) == state
        await loop.train()
    for _, sample in samples_of(batches[-1:]):  # against a baseline that had begun before this process
        assert 0.0 < np.abs(sample["advantages"]).max() < 1.0


async def test_an_algorithm_that_does_not_fit_the_rollouts_ends_the_run_and_says_why(
    mesh, script, make_config, start
) -> None:
    script.reward = lambda request, place: float(place) - 1.0
    async with start(make_config(mesh.services, train=environments(echo={"type": "max_rl"}))) as (loop, _):
        with pytest.raises(RunError, match="the algorithm of environment 'echo': max_rl divides by the mean reward"):
            await loop.train()
