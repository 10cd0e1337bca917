"""When groups that are lost one after the other end a run."""

import pytest

from meshrl.core.clock import Clock
from meshrl.orchestrator.dispatch import LossLimit
from meshrl.sampling.retry import RunError

UNREACHABLE_S = 60.0


@pytest.mark.parametrize("reason", ["ENGINE_FAILED", "UNREACHABLE", "DRAINING", "CANCELLED"])
async def test_groups_cut_off_by_a_service_that_restarts_end_no_run_before_it_had_its_time(make_group, reason) -> None:
    now_s = 0.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    lost = LossLimit(
        {"echo": 2},
        most_in_a_row=4,
        unreachable_s=UNREACHABLE_S,
        services=["rollout:50051"],
        clock=Clock(now=lambda: now_s, sleep=sleep),
    )
    group = make_group()
    group.cut_short = reason
    for _ in range(20):
        await lost.judge(group)
    assert slept[-1] == 2.0
    now_s = UNREACHABLE_S
    with pytest.raises(RunError, match=f"21 groups in a row were lost to failures, last in 'echo' with {reason}"):
        await lost.judge(group)
