import pytest

from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef, eval_metrics
from meshrl.wire.types import Rollout


def group(name: str, *rewards: float, size: int = 2) -> RolloutGroup:
    task = TaskRef(environment="echo", index=3)
    ticket = GroupTicket(group_id=name, task=task, size=size, for_step=1, min_version=0, active_version=0, seed=0)
    rollouts = [
        Rollout(
            rollout_id=f"{name}/{place}", group_id=name, task_key="t0", environment="echo", samples=(), reward=reward
        )
        for place, reward in enumerate(rewards)
    ]
    return RolloutGroup(ticket=ticket, rollouts=rollouts)


def test_eval_scores_are_mean_reward_and_share_of_tasks_passed() -> None:
    groups = [group("g0", 1.0, 0.0), group("g1", 0.5, 0.0), group("g2")]
    metrics = eval_metrics("echo", groups, k=2, pass_threshold=1.0)
    assert metrics["eval/echo/avg@2"] == 0.375
    assert metrics["eval/echo/pass@2"] == 0.5
    assert metrics["eval/echo/failed"] == pytest.approx(1 / 3)
    assert (metrics["eval/echo/scored"], metrics["eval/echo/asked"]) == (4.0, 6.0)


def test_a_group_is_asked_again_for_what_is_missing_with_seeds_of_its_own() -> None:
    ticket = group("g0", size=4).ticket
    more = ticket.for_missing(3, reseeds=2)
    assert (more.size, more.task, more.seed) == (3, ticket.task, ticket.seed + 2 * 2**31)
    assert ticket.for_missing(4, reseeds=0).seed == ticket.seed
