"""SleepEngines in the hub's rules: who is told, and which answers count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.line import LineLimits
from meshrl.weights.coordinator.states import Send
from meshrl.wire.types import AgentRegistration, AgentReport, AgentState, Sleep, Transport


@pytest.fixture
def rules() -> Coordinator:
    limits = LineLimits(keep_versions=2, min_engines=1, commit_deadline_s=20.0)
    return Coordinator(limits, lease_s=10.0, max_chunk_bytes=2**20)


REGISTRATION = AgentRegistration(
    engine_id="", url="http://e", transports=(Transport.STREAM,), layout_signature=b"l", can_sleep=True
)


def come(rules: Coordinator, name: str, *, connected: bool = True, can_sleep: bool = True, pool: str = "") -> None:
    registration = replace(REGISTRATION, engine_id=name, can_sleep=can_sleep, engine_pool=pool)
    rules.register(registration, f"lease-{name}", 0.0)
    if connected:
        rules.connect(f"lease-{name}", 0.0)


def say(rules: Coordinator, name: str, *, sleeping: bool, answered: int | None) -> None:
    report = AgentReport(lease_id=f"lease-{name}", state=AgentState.READY, sleeping=sleeping, sleep_answered=answered)
    rules.report(report, 1.0)


def test_engines_that_can_and_have_a_session_are_told(rules: Coordinator) -> None:
    come(rules, "a")
    come(rules, "away", connected=False)
    come(rules, "cannot", can_sleep=False)
    come(rules, "b")
    asked, actions = rules.sleep("")
    assert actions == [Send(engine_id=e, lease_id=f"lease-{e}", command=Sleep(number=1)) for e in ("a", "b")]
    assert (asked.over, asked.asleep, asked.awake) == (False, 0, 4)
    say(rules, "a", sleeping=True, answered=1)
    assert not asked.over
    say(rules, "b", sleeping=False, answered=1)
    assert (asked.over, asked.asleep, asked.awake) == (True, 1, 3)


def test_pool_is_kept_to(rules: Coordinator) -> None:
    come(rules, "a", pool="one")
    come(rules, "b", pool="two")
    asked, actions = rules.sleep("two")
    assert [action.engine_id for action in actions if isinstance(action, Send)] == ["b"]
    assert asked.awake == 1
    assert rules.sleep("three")[0].over


def test_answers_to_earlier_rounds_do_not_count_and_later_ones_do(rules: Coordinator) -> None:
    come(rules, "a")
    first, _ = rules.sleep("")
    second, _ = rules.sleep("")
    say(rules, "a", sleeping=True, answered=1)
    assert (first.over, second.over, second.asleep) == (True, False, 0)
    say(rules, "a", sleeping=True, answered=2)
    assert (first.asleep, second.over, second.asleep) == (1, True, 1)


def test_heartbeat_without_an_answer_leaves_the_round_open(rules: Coordinator) -> None:
    come(rules, "a")
    asked, _ = rules.sleep("")
    say(rules, "a", sleeping=True, answered=None)
    assert (asked.over, asked.asleep) == (False, 0)


@pytest.mark.parametrize("end", ["disconnected", "expired", "registered anew"])
def test_engine_whose_session_ends_is_waited_for_no_longer(rules: Coordinator, end: str) -> None:
    come(rules, "a")
    asked, _ = rules.sleep("")
    if end == "disconnected":
        rules.disconnect("lease-a")
    elif end == "expired":
        rules.tick(11.0)
    else:
        rules.register(replace(REGISTRATION, engine_id="a"), "lease-a2", 1.0)
    assert (asked.over, asked.asleep, asked.awake) == (True, 0, 1)
