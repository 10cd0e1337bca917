"""The advantage section becomes the function that it describes."""

import pytest
from pydantic import ValidationError

from meshrl.orchestrator.config import AdvantageConfig
from meshrl.orchestrator.work.recipes import build_advantage
from meshrl.sampling.retry import RunError

REWARDS, LENGTHS = [0.0, 1.0, 2.0], [10, 20, 30]


def advantages(**values: object) -> list[float]:
    made: list[float] = build_advantage(AdvantageConfig.model_validate(values))(REWARDS, LENGTHS).tolist()
    return made


def refusal(**values: object) -> str:
    with pytest.raises(ValidationError) as raised:
        AdvantageConfig.model_validate(values)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("default", [-1.0, 0.0, 1.0]),
        ("grpo", [-1.2247, 0.0, 1.2247]),
        ("rloo", [-1.5, 0.0, 1.5]),
        ("opo", [-4 / 3, -1 / 3, 2 / 3]),
    ],
)
def test_each_type_is_its_baseline(kind: str, expected: list[float]) -> None:
    assert advantages(type=kind) == pytest.approx(expected, abs=1e-4)


def test_long_rollouts_lose_reward_before_the_baseline() -> None:
    per_token = {"type": "per_token", "weight": 0.1}  # rewards -1, -1, -1
    assert advantages(length_penalty=per_token) == [0.0, 0.0, 0.0]
    overlong = {"type": "overlong", "max_length": 30, "buffer_length": 20, "weight": 2.0}  # rewards 0, 0, 0
    assert advantages(length_penalty=overlong) == pytest.approx([0.0, 0.0, 0.0])
    assert advantages(length_penalty=overlong | {"weight": 5.0}) == pytest.approx([1.5, 0.0, -1.5])


def test_a_custom_function_gets_its_arguments() -> None:
    path = "custom_functions.best_of_group"
    assert advantages(type="custom", import_path=path, kwargs={"scale": 0.5}) == [0.0, 0.0, 0.5]


def test_a_custom_function_that_cannot_be_used_ends_the_run_with_its_key() -> None:
    with pytest.raises(RunError, match=r"orchestrator\.advantage\.import_path 'no\.such': cannot import"):
        advantages(type="custom", import_path="no.such")
    with pytest.raises(RunError, match="return a finite number for each of the 3 rollouts"):
        advantages(type="custom", import_path="custom_functions.one_for_all")


def test_keys_of_another_type_are_errors() -> None:
    assert "custom needs orchestrator.advantage.import_path" in refusal(type="custom")
    assert "belong to type custom, not to grpo" in refusal(type="grpo", import_path="a.b")
    assert "belong to type custom, not to default" in refusal(kwargs={"scale": 1})
    assert "needs max_length and a buffer_length of at most that, got 8 and 9" in refusal(
        length_penalty={"type": "overlong", "max_length": 8, "buffer_length": 9, "weight": 1.0}
    )
    assert "belong to type overlong; leave them out" in refusal(
        length_penalty={"type": "per_token", "max_length": 8, "weight": 1.0}
    )
