import numpy as np
import pytest

from meshrl.algorithms.advantages import ADVANTAGES, load_custom_advantage


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
