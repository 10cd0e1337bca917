"""Which deadline a rollout oversteps, and which long waits are reported."""

from __future__ import annotations

import pytest

from meshrl.core.config.shared import StageDeadlinesConfig
from meshrl.rollout.stages import RolloutStage, StageKind, overdue, shortest_s
from meshrl.rollout.trouble_log import WaitingReport


@pytest.mark.parametrize(
    ("kind", "began_s", "words"),
    [
        (StageKind.SETUP, 92.0, ""),
        (StageKind.SETUP, 89.0, "longer in one stage than deadlines.setup_s = 10"),
        (StageKind.TURN, 89.0, ""),
        (StageKind.SCORING, 96.0, "longer in one stage than deadlines.scoring_s = 3"),
        (StageKind.OTHER, 0.0, ""),
    ],
)
def test_a_stage_is_held_against_its_own_deadline(kind, began_s, words):
    deadlines = StageDeadlinesConfig(setup_s=10.0, scoring_s=3.0)
    assert overdue(deadlines, RolloutStage("busy", began_s, kind), 0.0, 100.0) == words


def test_the_whole_rollout_has_a_deadline_in_every_stage():
    deadlines = StageDeadlinesConfig(rollout_s=60.0)
    stage = RolloutStage("busy", 99.0, StageKind.TURN)
    assert overdue(deadlines, stage, 39.0, 100.0) == "not finished within deadlines.rollout_s = 60"
    assert overdue(deadlines, stage, 41.0, 100.0) == ""
    assert (shortest_s(deadlines), shortest_s(StageDeadlinesConfig())) == (60.0, None)


def test_long_waits_are_said_once_a_minute_by_environment_and_stage(warned):
    report = WaitingReport()
    slow = RolloutStage("in its rewards and metrics", 0.0, StageKind.SCORING)
    elsewhere = RolloutStage("being played", 0.0, worker="worker 2")  # which reports it itself
    doing = [("judge", slow), ("judge", slow), ("quick", RolloutStage("in a model call", 90.0)), ("quick", elsewhere)]
    for now_s in (20.0, 100.0, 130.0, 161.0):
        report.look(doing, now_s)
    assert [line.split(";")[0] for line in warned] == [
        "waiting for environment judge: 2 rollouts in its rewards and metrics, the longest for 100 s",
        "waiting for environment judge: 2 rollouts in its rewards and metrics, the longest for 161 s",
        "waiting for environment quick: 1 rollouts in a model call, the longest for 71 s",
    ]
