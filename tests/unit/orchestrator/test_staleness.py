import pytest

from meshrl.orchestrator.work.plan import StalenessLaw


@pytest.mark.parametrize(
    ("level", "step", "required"),
    [(0, 1, 0), (0, 2, 1), (0, 7, 6), (1, 1, 0), (1, 2, 0), (1, 3, 1), (2, 3, 0), (2, 9, 6)],
)
def test_work_for_a_step_needs_the_version_that_the_async_level_allows(level: int, step: int, required: int) -> None:
    law = StalenessLaw(max_async_level=level, max_off_policy_steps=8)
    assert law.required_version(step) == required
    assert law.newest_admissible_step(required) >= step
    assert required == 0 or law.newest_admissible_step(required - 1) == step - 1


def test_a_rollout_is_usable_up_to_max_off_policy_steps_behind_the_trained_policy() -> None:
    law = StalenessLaw(max_async_level=1, max_off_policy_steps=3)
    assert law.staleness(step=10, oldest_version=9) == 0
    assert law.usable(step=10, oldest_version=6)
    assert not law.usable(step=10, oldest_version=5)
