"""Which rollout service plays a group next: what each achieved, what it has, whether it is there."""

from collections import Counter

import pytest

from meshrl.sampling.hosts import (
    FIRST_QUARANTINE_S,
    LONGEST_QUARANTINE_S,
    Achievement,
    GroupPlace,
    HostState,
    HostTable,
    Quarantine,
    differing,
)
from meshrl.wire.types import EnvironmentInfo


def info(name: str, tasks: int | None = 50) -> EnvironmentInfo:
    return EnvironmentInfo(name=name, taskset=name, num_tasks=tasks)


@pytest.fixture
def table() -> HostTable:
    table = HostTable(["a", "b"])
    for host in table.hosts:
        host.environments = {"echo": info("echo")}
        host.turn(HostState.SERVING, 0.0)
    return table


def play(table: HostTable, groups: int, pace_s: dict[str, float]) -> Counter[str]:
    """Keeps 16 groups of 4 in flight, each of which takes its service `pace_s`; returns who played how many."""
    now_s, played, number = 0.0, Counter[str](), 0
    running: list[tuple[float, int, str]] = []
    hosts = {host.address: host for host in table.hosts}
    while played.total() < groups:
        while len(running) < 16:
            host = table.choose("echo", 4, now_s)
            assert host is not None
            host.groups[str(number)] = GroupPlace(environment="echo", left=4, since_s=now_s)
            host.achievement("echo").count(now_s, begun=4)
            running.append((now_s + pace_s[host.address], number, host.address))
            number += 1
        running.sort()
        now_s, ended, address = running.pop(0)
        del hosts[address].groups[str(ended)]
        hosts[address].achievement("echo").count(now_s, finished=4)
        played[address] += 1
    return played


def test_services_of_one_pace_share_the_work(table: HostTable) -> None:
    played = play(table, 400, {"a": 1.0, "b": 1.0})
    assert 150 < played["a"] < 250


def test_a_service_that_is_three_times_as_fast_plays_more_and_the_other_not_nothing(table: HostTable) -> None:
    played = play(table, 400, {"a": 1.0, "b": 3.0})
    assert 3 * played["b"] < 1.3 * played["a"] * 3
    assert played["a"] > 2 * played["b"] > 0


def test_a_service_that_fails_at_once_does_not_draw_the_groups(table: HostTable) -> None:
    works, fails = table.hosts
    works.achievement("echo").count(0.0, begun=8)
    works.achievement("echo").count(10.0, finished=8)
    for second in range(10):
        fails.achievement("echo").count(float(second), begun=8)
        fails.achievement("echo").count(second + 0.01, failed=8)
    assert table.choose("echo", 4, 10.0) is works


def test_what_was_achieved_counts_half_after_a_minute() -> None:
    achieved = Achievement()
    achieved.count(0.0, begun=4)
    achieved.count(2.0, finished=4)
    assert (achieved.busy_s, achieved.finished) == (8.0, 4.0)
    achieved.count(62.0)
    assert (achieved.busy_s, achieved.finished, achieved.in_flight) == (4.0, 2.0, 0)


def test_who_is_full_or_away_or_to_be_avoided_is_passed_over(table: HostTable) -> None:
    first, second = table.hosts
    first.refuses_until_s = 5.0
    assert table.choose("echo", 4, 4.0) is second
    assert table.choose("echo", 4, 4.0, avoid={"b"}) is None
    second.turn(HostState.DRAINING, 4.0, "it is draining")
    assert table.choose("echo", 4, 4.0) is None
    assert table.choose("echo", 4, 5.0) is first
    assert table.choose("other", 4, 5.0) is None


def test_a_rollout_counts_by_its_tokens(table: HostTable) -> None:
    """Both sample 100 tokens a second; one happened to get long rollouts."""
    short, long = table.hosts
    for host, finished in ((short, 32), (long, 8)):
        host.achievement("echo").count(0.0, begun=finished)
        host.achievement("echo").count(10.0, finished=finished, tokens=finished * (3200 // finished))
        host.achievement("echo").busy_s = 32.0
    paces = [host.achievement("echo").pace_s(1.0, mean_tokens=160.0) for host in (short, long)]
    assert paces[0] == pytest.approx(paces[1])
    assert long.achievement("echo").pace_s(1.0) > 3 * short.achievement("echo").pace_s(1.0)


def test_a_service_in_quarantine_or_with_engines_that_are_too_old_is_used_only_where_nobody_else_serves(
    table: HostTable,
) -> None:
    first, second = table.hosts
    first.achievement("echo").quarantine.until_s = 5.0
    assert table.choose("echo", 4, 4.0) is second
    second.refuses_until_s = 4.5
    assert table.choose("echo", 4, 4.0) is None  # it is waited for
    second.turn(HostState.AWAY, 4.0, "gone")
    assert table.choose("echo", 4, 4.0) is first
    second.turn(HostState.SERVING, 4.0)
    second.refuses_until_s, second.version, first.version = 0.0, 3, 4
    assert second.why_not("echo", 9.0, 4) == "its engines serve version 3, and groups need 4"
    assert table.choose("echo", 4, 9.0, min_version=4) is first
    first.others = 100
    assert table.choose("echo", 4, 9.0, min_version=3) is second


def test_a_service_that_had_every_version_when_it_was_looked_at_gets_groups_that_need_a_newer_one(
    table: HostTable,
) -> None:
    first, second = table.hosts
    first.version, first.needed = 6, 4  # looked at a moment later than the other
    second.version, second.needed = 4, 4
    first.others = 100
    assert table.choose("echo", 4, 9.0, min_version=6) is second
    second.needed = 5
    assert second.why_not("echo", 9.0, 6) == "its engines serve version 4, and groups need 5"
    assert table.choose("echo", 4, 9.0, min_version=6) is first


def test_others_load_counts(table: HostTable) -> None:
    first, second = table.hosts
    first.others = 100
    assert table.choose("echo", 4, 0.0) is second


def test_an_environment_is_away_since_its_last_service_went(table: HostTable) -> None:
    first, second = table.hosts
    first.turn(HostState.AWAY, 10.0, "gone")
    assert not table.all_away("echo", 15.0, 5.0)
    second.turn(HostState.DRAINING, 20.0, "going")
    assert not table.all_away("echo", 26.0, 6.1)
    assert table.all_away("echo", 26.0, 6.0)
    second.patience_s = 60.0  # it dials in
    assert not table.all_away("echo", 79.0, 6.0)
    assert table.all_away("echo", 80.0, 6.0)
    assert [table.next_in_turn("echo").address for _ in range(3)] == ["a", "b", "a"]
    first.turn(HostState.SERVING, 27.0)
    assert not table.all_away("echo", 99.0, 0.0)


def test_one_name_means_one_taskset(table: HostTable) -> None:
    table.hosts[1].environments = {"echo": info("echo", None)}
    assert differing(table.hosts) == [
        "environment 'echo' has 50 tasks at a and infinitely many tasks at b; host the same taskset with the same args"
        " at both, or give one another name"
    ]


def test_three_bad_groups_in_a_row_leave_a_service_out_and_each_time_lasts_twice_as_long() -> None:
    quarantine = Quarantine()
    assert [quarantine.group_failed(10.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
    assert quarantine.until_s == 10.0 + FIRST_QUARANTINE_S
    assert quarantine.group_failed(11.0) == 0.0  # it was out already
    assert quarantine.group_failed(50.0) == 2 * FIRST_QUARANTINE_S
    for _ in range(10):
        quarantine.group_failed(quarantine.until_s)
    assert quarantine.group_failed(quarantine.until_s) == LONGEST_QUARANTINE_S


def test_a_group_that_goes_well_ends_the_count_and_the_doubling() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.group_failed(0.0)
    quarantine.group_went_well()
    assert [quarantine.group_failed(1.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
    quarantine.group_went_well()
    assert [quarantine.group_failed(100.0) for _ in range(3)] == [0.0, 0.0, FIRST_QUARANTINE_S]
