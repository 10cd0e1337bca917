import functools

import numpy as np
import pytest

from meshrl.algorithms.advantages import (
    ADVANTAGES,
    grpo_advantages,
    load_custom_advantage,
    mean_baseline_advantages,
    opo_advantages,
    penalise_length,
    per_token_penalty,
    rloo_advantages,
    soft_overlong_penalty,
)


def test_mean_baseline_is_reward_minus_mean() -> None:
    advantages = mean_baseline_advantages([1.0, 0.0, 0.0, 1.0], [3, 3, 3, 3])
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_divides_by_standard_deviation() -> None:
    assert grpo_advantages([0.0, 4.0], [1, 1]).tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_rloo_baseline_leaves_the_rollout_out() -> None:
    assert rloo_advantages([3.0, 0.0, 0.0], [1, 1, 1]).tolist() == [3.0, -1.5, -1.5]
    assert rloo_advantages([3.0], [1]).tolist() == [0.0]


def test_opo_baseline_weighs_rewards_by_length() -> None:
    assert opo_advantages([1.0, 0.0], [3, 1]).tolist() == [0.25, -0.75]


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_equal_rewards_have_no_signal(kind: str) -> None:
    assert ADVANTAGES[kind]([0.1] * 7, [2] * 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize(
    ("rewards", "lengths"), [([], []), ([float("nan"), 1.0], [1, 1]), ([1.0, 2.0], [1])], ids=["empty", "nan", "uneven"]
)
def test_bad_groups_are_refused(kind: str, rewards: list[float], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="reward"):
        ADVANTAGES[kind](rewards, lengths)


def test_opo_refuses_a_group_without_sampled_tokens() -> None:
    with pytest.raises(ValueError, match="lengths"):
        opo_advantages([1.0, 0.0], [0, 0])


def test_length_penalty_comes_off_the_reward_before_the_baseline() -> None:
    cost = functools.partial(per_token_penalty, coefficient=0.1)
    overlong = functools.partial(soft_overlong_penalty, max_length=10, buffer_length=4, weight=2.0)
    assert overlong([6, 8, 10, 11]).tolist() == [0.0, 1.0, 2.0, 2.0]
    assert penalise_length(mean_baseline_advantages, overlong)([1.0, 1.0], [6, 8]).tolist() == [0.5, -0.5]
    advantage = penalise_length(mean_baseline_advantages, cost)
    assert advantage([1.0, 1.0], [6, 8]).tolist() == pytest.approx([0.1, -0.1])  # 0.4 and 0.2, less their mean
    with pytest.raises(ValueError, match="reward"):
        advantage([], [])


def test_custom_advantage_gets_rewards_and_lengths_and_its_keywords() -> None:
    advantage = load_custom_advantage("custom_functions.best_of_group", {"scale": 0.5})
    advantages = advantage([1.0, 3.0, 3.0], [4, 5, 0])
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [0.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="finite"):
        advantage([float("inf")], [1])


def test_custom_advantage_errors_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"orchestrator\.advantage\.import_path 'custom_functions\.nothing'"):
        load_custom_advantage("custom_functions.nothing", {}, key="orchestrator.advantage")
    with pytest.raises(ValueError, match=r"advantage\.kwargs"):
        load_custom_advantage("custom_functions.best_of_group", {"size": 1})
    with pytest.raises(ValueError, match="each of the 2 rollouts"):
        load_custom_advantage("custom_functions.one_for_all", {})([1.0, 2.0], [1, 1])
