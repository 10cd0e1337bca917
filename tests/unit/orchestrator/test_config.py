import pytest
from pydantic import ValidationError

from meshrl.orchestrator.config import OrchestratorConfig


def refusal(**values) -> str:
    with pytest.raises(ValidationError) as raised:
        OrchestratorConfig.model_validate(values)
    return str(raised.value)


def test_batch_size_must_be_whole_groups_and_the_message_offers_sizes() -> None:
    assert "orchestrator.batch_size must be a multiple of group_size (16), got 100; use 96 or 112" in refusal(
        batch_size=100, group_size=16
    )
    assert "got 8; use 16" in refusal(batch_size=8, group_size=16)


def test_the_older_spelling_of_group_size_is_accepted() -> None:
    config = OrchestratorConfig.model_validate({"batch_size": 12, "rollouts_per_example": 4})
    assert (config.group_size, config.groups_per_step) == (4, 3)


def test_environments_need_names_of_their_own() -> None:
    assert "must have distinct names, got echo more than once" in refusal(
        train={"env": [{"id": "echo"}, {"id": "echo"}]}
    )


def test_an_evaluation_needs_an_environment() -> None:
    assert "orchestrator.eval.env must name at least one environment" in refusal(eval={})


@pytest.mark.parametrize(
    ("given", "of_tasks", "of_rollouts"),
    [
        ({}, 0, None),
        ({"seed": 0}, 0, 0),
        ({"seed": 5}, 5, 5),
        ({"sampling": {"seed": 7}}, 0, 7),
        ({"seed": 5, "sampling": {"seed": 7}}, 5, 7),
        ({"seed": 5, "train": {"env": [{"id": "echo", "sampling": {"seed": 9}}]}}, 5, 5),
        ({"train": {"env": [{"id": "echo", "sampling": {"seed": 9}}]}}, 0, 0),
    ],
)
def test_rollouts_have_seeds_where_one_was_set_and_tasks_always(given, of_tasks: int, of_rollouts: int | None) -> None:
    config = OrchestratorConfig.model_validate(given)
    assert (config.task_seed, config.sampling_seed) == (of_tasks, of_rollouts)


def test_a_bench_run_is_short_unless_told_otherwise() -> None:
    assert OrchestratorConfig(bench=True).last_step == 5
    assert OrchestratorConfig(bench=True, max_steps=9).last_step == 9
    assert OrchestratorConfig().last_step is None


def test_room_for_one_group_in_flight_is_the_least() -> None:
    assert "orchestrator.max_inflight_rollouts must be at least group_size (8), got 4" in refusal(
        max_inflight_rollouts=4
    )
