import pytest

from meshrl.orchestrator.work.plan import StalenessLaw


@pytest.mark.parametrize(
    ("level", "step", "required"),
    [(0, 1, 0), (0, 2, 1), (0, 7, 6), (1, 1, 0), (1, 2, 0), (1, 3, 1), (2, 3, 0), (2, 9, 6)],
)
def test_work_for_a_step_needs_the_version_that_the_async_level_allows(level: int, step: int, required: int) -> None:
    law = StalenessLaw(max_async_level=level, max_off_policy_steps=8)
    assert law.required_version(step) == required
    assert law.admits(step=step, active_version=required)
    assert required == 0 or not law.admits(step=step, active_version=required - 1)


def test_newest_admissible_step_is_the_last_one_that_is_admitted() -> None:
    law = StalenessLaw(max_async_level=2, max_off_policy_steps=8)
    newest = law.newest_admissible_step(5)
    assert newest == 8
    assert law.admits(step=newest, active_version=5)
    assert not law.admits(step=newest + 1, active_version=5)


def test_a_rollout_is_usable_up_to_max_off_policy_steps_behind_the_trained_policy() -> None:
    law = StalenessLaw(max_async_level=1, max_off_policy_steps=3)
    assert law.staleness(step=10, oldest_version=9) == 0
    assert law.usable(step=10, oldest_version=6)
    assert not law.usable(step=10, oldest_version=5)


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1 and 8"):
        StalenessLaw(max_async_level=-1, max_off_policy_steps=8)
