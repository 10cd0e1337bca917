"""Which rollouts are played: seeds as in a run's evaluations, nothing that is done, environments mixed."""

from __future__ import annotations

from meshrl.trials.plan import TaskSpan, Trial, differing_settings, plan_trials

SPANS = [TaskSpan(environment="a", tasks=2, group_size=3), TaskSpan(environment="b", tasks=3, group_size=1)]


def test_a_rollout_has_the_seed_that_an_evaluation_during_a_run_gives_it() -> None:
    """There a group has the seed (seed << 32) + task * size, and its rollout i one that is i higher."""
    trials = plan_trials(SPANS, seed=7, checkpoint="base", done=())
    found = {(trial.environment, trial.task, trial.number): trial.seed for trial in trials}
    assert found[("a", 0, 0)] == 7 << 32
    assert found[("a", 1, 2)] == (7 << 32) + 1 * 3 + 2
    assert found[("b", 2, 0)] == (7 << 32) + 2
    assert len(found) == 9


def test_what_is_done_is_left_out_and_only_for_its_own_checkpoint() -> None:
    done = {("base", "a", 0, 0), ("base", "b", 1, 0), ("step_1", "a", 0, 1)}
    left = plan_trials(SPANS, seed=0, checkpoint="base", done=done)
    assert {trial.key("base") for trial in left} == {
        trial.key("base") for trial in plan_trials(SPANS, seed=0, checkpoint="base", done=())
    } - done
    assert len(left) == 7


def test_environments_take_turns_from_the_first_rollout_to_the_last() -> None:
    names = [trial.environment for trial in plan_trials(SPANS, seed=0, checkpoint="base", done=())]
    assert names == ["a", "b", "a", "a", "b", "a", "a", "b", "a"]
    assert isinstance(plan_trials(SPANS, seed=0, checkpoint="base", done=())[0], Trial)


def test_settings_that_changed_are_named_and_a_new_environment_is_no_change() -> None:
    kept = {"model": "x", "sampling": {"temperature": 1.0}, "env": {"a": {"group_size": 2}, "b": {"group_size": 1}}}
    grown = {**kept, "env": {**kept["env"], "c": {"group_size": 4}}}  # type: ignore[dict-item]  # one level is enough
    assert differing_settings(kept, grown) == []
    assert differing_settings(kept, {**kept, "env": {"a": {"group_size": 2}}}) == []
    changed = {**kept, "sampling": {"temperature": 0.0}, "env": {"a": {"group_size": 3}}}
    assert differing_settings(kept, changed) == [
        "sampling.temperature was 1.0 and is 0.0",
        "env.a.group_size was 2 and is 3",
    ]
