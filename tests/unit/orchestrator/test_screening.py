import pytest

from meshrl.orchestrator.work.plan import StalenessLaw, screen_stale
from meshrl.orchestrator.work.screening import DropReason, screen_finished


def reasons(screened):
    return {rollout.rollout_id: reason for rollout, reason in screened.dropped}


def screen(rollouts, *, zero_signal=True, empty=True):
    return screen_finished(rollouts, drop_empty=empty, drop_zero_signal=zero_signal, tolerance=1e-8, least=2)


def test_a_group_survives_losses_with_two_rollouts(make_rollout) -> None:
    screened = screen([make_rollout("a", reward=0.0), make_rollout("b", reward=1.0)])
    assert [rollout.rollout_id for rollout in screened.kept] == ["a", "b"]
    assert screened.dropped == ()


def test_a_group_with_one_rollout_left_is_dropped(make_rollout) -> None:
    screened = screen([make_rollout("a", reward=1.0), make_rollout("b", sampled=0)])
    assert screened.kept == ()
    assert reasons(screened) == {"a": DropReason.GROUP_LOST, "b": DropReason.EMPTY}


def test_equal_rewards_are_zero_signal_unless_the_filter_is_off(make_rollout) -> None:
    rollouts = [make_rollout(name, reward=0.3) for name in "abc"]
    assert set(reasons(screen(rollouts)).values()) == {DropReason.ZERO_SIGNAL}
    assert len(screen(rollouts, zero_signal=False).kept) == 3


def test_rewards_are_compared_within_an_agent(make_rollout) -> None:
    by_role = [
        make_rollout("a", reward=0.0, agent="proposer"),
        make_rollout("b", reward=1.0, agent="judge"),
        make_rollout("c", reward=0.0, agent="proposer"),
        make_rollout("d", reward=1.0, agent="judge"),
    ]
    assert screen(by_role).kept == ()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_dropped(make_rollout, reward: float) -> None:
    screened = screen([make_rollout("a", reward=0), make_rollout("b", reward=1), make_rollout("c", reward=reward)])
    assert [rollout.rollout_id for rollout in screened.kept] == ["a", "b"]
    assert reasons(screened) == {"c": DropReason.NOT_FINITE}


def test_stale_rollouts_leave_and_a_group_with_one_fresh_rollout_goes_with_them(make_rollout) -> None:
    law = StalenessLaw(max_async_level=1, max_off_policy_steps=2)
    rollouts = [make_rollout("old", version=0), make_rollout("new", version=3)]
    assert len(screen_stale(rollouts, step=3, law=law, least=2).kept) == 2
    screened = screen_stale(rollouts, step=4, law=law, least=2)
    assert screened.kept == ()
    assert reasons(screened) == {"old": DropReason.STALE, "new": DropReason.GROUP_LOST}
