"""The agent's rules: groups and sleep beside whatever it does, and gangs that are not waited for any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrl.inference.agent.states import (
    AgentMachine,
    CancelFetch,
    LetGo,
    LineMachine,
    ResumeEngine,
    SendReport,
    StartApply,
    StartFetch,
    StartJoin,
    StartSleep,
    Target,
)
from meshrl.wire.types import (
    Abort,
    AgentFault,
    AgentState,
    ApplyReport,
    Commit,
    JoinGroup,
    Prepare,
    Resume,
    Retire,
    Sleep,
)

FAULT = AgentFault(reason="GROUP_BROKEN", message="rank 0 did not come")
GROUP = JoinGroup(
    generation=3, store_address="h:1", backend="gloo", num_senders=1, num_receivers=2, first_receiver=1, deadline_s=9.0
)


def serving(version: int = 4) -> AgentMachine:
    machine = AgentMachine(version=version)
    machine.connected()
    return machine


def only(machine: AgentMachine) -> LineMachine:
    (line,) = machine.lines.values()
    return line


def test_joining_changes_no_state_and_is_told_once_it_is_over() -> None:
    machine = serving()
    machine.command(Prepare(version=5, artifact_id="five"))
    assert machine.command(GROUP) == [StartJoin(group=GROUP)]
    assert (only(machine).state, machine.group) == (AgentState.FETCHING, None)
    assert machine.joined(GROUP) == [SendReport()]
    assert (only(machine).state, machine.group) == (AgentState.FETCHING, 3)
    assert only(machine).fetched("five") == [SendReport()]


def test_same_group_told_again_with_less_time_is_joined_once() -> None:
    machine = serving()
    machine.command(GROUP)
    again = replace(GROUP, deadline_s=2.0)
    assert machine.command(again) == [SendReport()]
    machine.joined(GROUP)
    assert machine.command(again) == [SendReport()]
    assert machine.group == 3


def test_newer_group_abandons_the_older_and_late_news_of_that_count_for_nothing() -> None:
    machine = serving()
    machine.command(GROUP)
    machine.joined(GROUP)
    newer = replace(GROUP, generation=4)
    assert machine.command(newer) == [StartJoin(group=newer)]
    assert machine.group is None
    assert machine.joined(GROUP) == machine.join_failed(GROUP, FAULT) == machine.group_lost(3) == []
    machine.joined(newer)
    assert machine.group == 4


def test_group_that_was_not_joined_is_a_fault_of_no_version_and_may_be_tried_again() -> None:
    machine = serving()
    machine.command(GROUP)
    assert machine.join_failed(GROUP, FAULT) == [SendReport(fault=FAULT, of_group=True)]
    assert (only(machine).state, only(machine).version, machine.group) == (AgentState.READY, 4, None)
    assert machine.command(GROUP) == [StartJoin(group=GROUP)]


def test_lost_group_is_told_and_the_broken_transfer_leads_back_to_the_version_served() -> None:
    machine = serving()
    machine.command(GROUP)
    machine.joined(GROUP)
    machine.command(Prepare(version=5, artifact_id="five"))
    assert machine.group_lost(3) == [SendReport()]
    assert machine.group_lost(3) == []
    told = only(machine).fetch_failed("five", FAULT)
    assert told == [SendReport(fault=FAULT, about=Target(version=5, artifact_id="five"))]
    assert (only(machine).state, only(machine).version, only(machine).target) == (AgentState.READY, 4, None)


def test_weights_loaded_by_hand_make_the_next_commit_apply_again() -> None:
    machine = serving()
    machine.command(Commit(version=5, artifact_id="five"))
    only(machine).fetched("five")
    report = ApplyReport(version=5, root=b"r", pause_s=0.1, prepare_s=0.1, requests_kept=0)
    only(machine).applied("five", report)
    assert only(machine).displaced(6)
    assert (only(machine).state, only(machine).version) == (AgentState.READY, 6)
    assert machine.command(Commit(version=5, artifact_id="five"))[0] == StartFetch(version=5, artifact_id="five")
    assert only(machine).fetched("five")[-1] == StartApply(version=5, artifact_id="five", hold=False)
    assert not only(machine).displaced(7)  # being swapped


def test_abandoned_version_stays_cancelled_beside_a_group() -> None:
    machine = serving()
    machine.command(Prepare(version=5, artifact_id="five"))
    machine.command(GROUP)
    first, *_ = machine.command(Prepare(version=6, artifact_id="six"))
    assert first == StartFetch(version=6, artifact_id="six")
    assert CancelFetch() not in machine.command(replace(GROUP, generation=9))


def test_decided_version_is_fetched_and_served_before_a_newer_one_however_many_come() -> None:
    machine = AgentMachine()
    machine.connected()
    assert machine.command(Commit(version=5, artifact_id="five"))[0] == StartFetch(version=5, artifact_id="five")
    for version, artifact_id in ((6, "six"), (7, "seven")):
        assert machine.command(Prepare(version=version, artifact_id=artifact_id)) == []
        assert machine.command(Commit(version=version, artifact_id=artifact_id)) == []
    assert only(machine).fetched("five")[-1] == StartApply(version=5, artifact_id="five", hold=False)
    report = ApplyReport(version=5, root=b"r", pause_s=0.1, prepare_s=0.1, requests_kept=0)
    assert only(machine).applied("five", report)[:2] == [
        SendReport(applied=report),
        StartFetch(version=7, artifact_id="seven"),
    ]
    assert only(machine).version == 5


def test_newer_version_is_fetched_at_once_when_the_one_before_fails() -> None:
    machine = serving()
    machine.command(Commit(version=5, artifact_id="five"))
    machine.command(Commit(version=6, artifact_id="six"))
    told = only(machine).fetch_failed("five", FAULT)
    assert told[0] == SendReport(fault=FAULT, about=Target(version=5, artifact_id="five", committed=True))
    assert told[1] == StartFetch(version=6, artifact_id="six")


@pytest.mark.parametrize("version", [4, 5])
def test_decided_version_is_given_up_for_one_of_a_trainer_that_went_back(version: int) -> None:
    machine = serving()
    machine.command(Commit(version=5, artifact_id="five"))
    first, *_ = machine.command(Commit(version=version, artifact_id="again"))
    assert first == StartFetch(version=version, artifact_id="again")


def test_sleep_is_started_where_nothing_is_under_way_and_answered_when_it_is_over() -> None:
    machine = serving()
    assert machine.command(Sleep(number=7)) == [StartSleep(number=7)]
    assert (only(machine).state, machine.sleep_answered) == (AgentState.READY, None)
    assert machine.slept(7) == [SendReport()]
    assert machine.sleep_answered == 7
    machine.connected()
    assert machine.sleep_answered is None


def test_sleep_is_declined_at_once_while_a_version_is_under_way() -> None:
    machine = serving()
    machine.command(Prepare(version=5, artifact_id="five"))
    assert machine.command(Sleep(number=1)) == [SendReport()]
    only(machine).fetched("five")
    assert machine.command(Sleep(number=2)) == [SendReport()]
    assert (only(machine).state, machine.sleep_answered) == (AgentState.PREPARED, 2)


def test_failed_sleep_is_a_fault_of_no_version() -> None:
    machine = serving()
    machine.command(Sleep(number=1))
    fault = AgentFault(reason="ENGINE_FAILED", message="no host memory")
    assert machine.slept(1, fault) == [SendReport(fault=fault, of_group=True)]
    assert (only(machine).state, only(machine).version, machine.sleep_answered) == (AgentState.READY, 4, 1)


@pytest.mark.parametrize(
    ("told", "then"),
    [
        (Commit(version=6, artifact_id="six"), StartFetch(version=6, artifact_id="six")),
        (Commit(version=5, artifact_id="five"), None),
    ],
    ids=["a newer version is decided", "its gang goes on without the others"],
)
def test_an_engine_that_is_let_go_while_it_applies_does_not_wait_for_its_gang(
    told: Commit, then: StartFetch | None
) -> None:
    machine = serving()
    machine.command(Commit(version=5, artifact_id="five", hold=True))
    assert only(machine).fetched("five")[-1] == StartApply(version=5, artifact_id="five", hold=True)
    assert machine.command(told) == []  # it is not paused for its gang yet
    report = ApplyReport(version=5, root=b"root", pause_s=0.1, prepare_s=0.1, requests_kept=0)
    assert only(machine).applied("five", report) == [SendReport(), ResumeEngine()]
    actions = only(machine).resumed(report)
    assert actions[0] == SendReport(applied=report)
    assert (then is None) == (only(machine).state is AgentState.READY)
    assert then is None or then in actions


def test_a_gang_is_waited_for_again_in_the_next_version() -> None:
    machine = serving()
    report = ApplyReport(version=5, root=b"root", pause_s=0.1, prepare_s=0.1, requests_kept=0)
    machine.command(Commit(version=5, artifact_id="five", hold=True))
    only(machine).fetched("five")
    machine.command(Commit(version=5, artifact_id="five"))
    only(machine).applied("five", report)
    only(machine).resumed(report)
    machine.command(Commit(version=6, artifact_id="six", hold=True))
    only(machine).fetched("six")
    assert only(machine).applied("six", replace(report, version=6)) == [SendReport()]
    assert only(machine).held


def test_the_first_run_takes_the_line_of_the_engines_own_version_over_and_others_begin_without_one() -> None:
    machine = serving()
    machine.command(Prepare(run_id="a", version=5, artifact_id="five"))
    machine.command(Prepare(run_id="b", version=5, artifact_id="other five"))
    assert {run: (line.state, line.version) for run, line in machine.lines.items()} == {
        "a": (AgentState.FETCHING, 4),
        "b": (AgentState.SEEDING, None),
    }
    assert machine.lines["b"].fetched("other five") == [SendReport(run_id="b")]
    assert machine.lines["a"].target is not None


def test_a_run_that_is_over_lets_go_of_its_version_and_no_other_does() -> None:
    machine = serving()
    for run in ("a", "b"):
        machine.command(Commit(run_id=run, version=5, artifact_id=run))
    retire = Retire(run_id="a", version=5, artifact_id="a", epoch=1)
    assert machine.command(retire) == [CancelFetch(run_id="a"), LetGo(run_id="a")]
    assert machine.let_go("a") == [SendReport(run_id="b")]
    assert list(machine.lines) == ["b"]
    assert machine.command(retire) == []


@pytest.mark.parametrize(("artifact_id", "ends"), [("five", True), ("", True), ("another five", False)])
def test_abort_and_resume_are_about_the_content_that_they_name(artifact_id: str, ends: bool) -> None:
    machine = serving()
    machine.command(Prepare(version=5, artifact_id="five"))
    assert bool(machine.command(Abort(version=5, artifact_id=artifact_id))) is ends
    machine.command(Commit(version=5, artifact_id="five", hold=True))
    only(machine).fetched("five")
    only(machine).applied("five", ApplyReport(version=5, root=b"", pause_s=0.0, prepare_s=0.0, requests_kept=0))
    assert machine.command(Resume(version=5, artifact_id=artifact_id)) == ([ResumeEngine()] if ends else [])
