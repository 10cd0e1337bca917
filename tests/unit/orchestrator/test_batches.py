from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from meshrl.algorithms.advantages import mean_baseline_advantages, opo_advantages
from meshrl.algorithms.recipes.grpo import group_advantages
from meshrl.orchestrator.work.batches import AssembledBatch, assemble
from meshrl.wire.types import Rollout
from rl_streams import rl_streams


def assembled_of(
    groups: Sequence[Sequence[Rollout]], environments: Mapping[str, int], dp_size: int = 1
) -> AssembledBatch:
    """The batch of step 4, whose rows are as long as the longest sample may be."""
    return assemble(
        groups,
        run_id="main",
        step=4,
        streams=rl_streams(groups, mean_baseline_advantages),
        environments=environments,
        seq_len=max(environments.values()),
        dp_size=dp_size,
    )


def test_advantages_are_relative_to_the_group_and_reach_every_token(make_rollout) -> None:
    groups = [
        [make_rollout("a", reward=0.0), make_rollout("b", reward=1.0)],
        [make_rollout("c", reward=5.0, environment="math"), make_rollout("d", reward=9.0, environment="math")],
    ]
    assembled = assembled_of(groups, {"echo": 64, "math": 64})
    assert assembled.advantages == {"a": -0.5, "b": 0.5, "c": -2.0, "d": 2.0}
    (row,) = assembled.batch.micro_batches
    assert assembled.batch.step == 4
    assert assembled.batch.loss_tokens == 12 == int(row.loss_mask.sum())
    by_rollout = dict(zip(row.rollout_ids, zip(row.sample_offsets, row.env_index, strict=False), strict=True))
    start, env = by_rollout["d"]
    assert env == 1
    np.testing.assert_array_equal(row.advantages[start : start + 5], [0, 0, 2, 2, 2])


def test_rows_respect_the_token_budget_and_the_ranks(make_rollout) -> None:
    group = [make_rollout(f"r{index}", reward=index) for index in range(6)]
    rows = assembled_of([group], {"echo": 10}, dp_size=2).batch.micro_batches
    assert len(rows) % 2 == 0
    assert max(len(row.token_ids) for row in rows) <= 10


def test_a_rollout_whose_sampled_tokens_lie_beyond_the_budget_is_reported(make_rollout) -> None:
    group = [make_rollout("long", reward=1.0, prompt=20), make_rollout("short", reward=0.0)]
    assembled = assembled_of([group], {"echo": 16})
    assert (assembled.untrainable, assembled.dropped_samples) == ({"long"}, 1)
    with pytest.raises(ValueError, match="has a loss token within seq_len 16"):
        assembled_of([group[:1]], {"echo": 16})


def test_an_environment_may_have_shorter_samples_than_a_row(make_rollout) -> None:
    group = [
        make_rollout(f"{name}{index}", reward=index, prompt=4, sampled=6, environment=name)
        for name in ("echo", "math")
        for index in range(2)
    ]
    assembled = assembled_of([group], {"echo": 10, "math": 7})
    lengths = {
        name: int(end - start)
        for row in assembled.batch.micro_batches
        for name, start, end in zip(row.rollout_ids, row.sample_offsets[:-1], row.sample_offsets[1:], strict=True)
    }
    assert lengths == {"echo0": 10, "echo1": 10, "math0": 7, "math1": 7}
    assert (assembled.truncated_samples, assembled.batch.loss_tokens) == (2, 6 + 6 + 3 + 3)


def test_agents_have_baselines_of_their_own(make_rollout) -> None:
    group = [
        make_rollout("a", reward=0.0, agent="x"),
        make_rollout("b", reward=1.0, agent="x"),
        make_rollout("c", reward=10.0, agent="y"),
        make_rollout("d", reward=12.0, agent="y"),
    ]
    assert group_advantages(group, mean_baseline_advantages) == {"a": -0.5, "b": 0.5, "c": -1.0, "d": 1.0}


def test_empty_rollouts_do_not_break_a_length_weighted_baseline(make_rollout) -> None:
    group = [make_rollout("a", reward=0.0, sampled=0), make_rollout("b", reward=1.0, sampled=0)]
    assert group_advantages(group, opo_advantages) == {"a": -0.5, "b": 0.5}
