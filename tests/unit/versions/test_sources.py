"""From whom a host fetches and over how many connections, without any network."""

from __future__ import annotations

from socket import gethostbyname, gethostname

import pytest

from meshrl.machine.addresses import is_of_this_machine
from meshrl.versions.sources import AVOID_S, DEAD_S, FAR_COUNT, FAR_S, ByteSources, ConnectionCount


def settled(rate_of: dict[int, float], most: int = 32, windows: int = 40) -> list[int]:
    """The numbers of connections that are tried, in order, where so many make these rates."""
    count = ConnectionCount()
    tried = [count.count]
    for _ in range(windows):
        count.measured(rate_of[count.count], most)
        if count.count != tried[-1]:
            tried.append(count.count)
    return tried


def test_connections_are_doubled_while_more_of_them_bring_more() -> None:
    lossy = {n: 3.0 * n for n in (1, 2, 4, 8, 16, 32)}
    assert settled(lossy) == [1, 2, 4, 8, 16, 32]
    assert settled({**lossy, 12: 36.0}, most=12) == [1, 2, 4, 8, 12]


def test_one_connection_is_kept_where_it_fills_the_link_and_another_tried_now_and_then() -> None:
    tried = settled(dict.fromkeys((1, 2), 100.0))
    assert set(tried) == {1, 2}
    count = ConnectionCount()
    times = []
    for _ in range(200):
        count.measured(100.0, 32)
        times.append(count.count)
    assert times.count(1) > 2 * times.count(2)


def test_from_far_away_several_are_taken_at_once() -> None:
    near, far = ConnectionCount(), ConnectionCount()
    near.first_answer(FAR_S / 2, 32)
    far.first_answer(2 * FAR_S, 32)
    assert (near.count, far.count) == (1, FAR_COUNT)


def test_a_source_near_by_gets_few_connections_although_more_seem_faster_on_a_busy_machine() -> None:
    source, count = ByteSources("hub:1").choose(0.0), ConnectionCount()
    source.answered(2 * FAR_S)  # it was busy, too
    for _ in range(40):
        count.measured(count.count * 1e7, source.connections(32))
    assert (source.connections(32), count.count) == (32, 32)
    source.answered(FAR_S / 2)
    for _ in range(40):
        count.measured(count.count * 1e7, source.connections(32))
    assert (source.connections(32), source.connections(2), count.count) == (FAR_COUNT, 2, FAR_COUNT)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.0.1:1", "[::1]:1", "localhost:1", f"{gethostname()}:1"])
def test_a_source_on_this_machine_is_never_far(address: str) -> None:
    source = ByteSources(address).choose(0.0)
    source.answered(4 * FAR_S)  # it was busy
    assert (source.is_far, source.is_near) == (False, True)


def test_the_addresses_of_this_machine_are_its_own_and_no_others() -> None:
    assert is_of_this_machine(f"{gethostbyname(gethostname())}:1")
    for other in ("203.0.113.7:1", "[2001:db8::7]:1", "hub.example:1", "127.0.0.1.example:1", "unix:/run/hub"):
        assert not is_of_this_machine(other)


def test_a_parent_is_far_while_even_its_fastest_answer_took_long() -> None:
    source = ByteSources("hub:1").choose(0.0)
    assert not source.is_far  # nobody knows
    source.answered(4 * FAR_S)
    assert source.is_far
    source.answered(FAR_S / 2)  # it was busy
    source.answered(4 * FAR_S)
    assert not source.is_far


def test_the_fastest_relay_is_asked_each_of_them_once_and_the_hub_only_without_any() -> None:
    sources = ByteSources("hub:1", ["a:1", "b:1"])
    first = sources.choose(0.0)
    assert first.address == "a:1"
    first.measured(10.0)
    second = sources.choose(1.0)
    assert second.address == "b:1"
    second.measured(5.0)
    assert sources.choose(2.0) is first
    for _ in range(9):
        first.measured(1.0)
    assert sources.choose(3.0) is second
    assert not second.failed(4.0)  # it may be one connection of many
    assert second.failed(4.0 + DEAD_S)
    assert sources.choose(8.0) is first
    assert first.failed(8.0, at_once=True)
    assert sources.choose(8.1).is_hub
    assert sources.choose(8.0 + AVOID_S[0]).address in ("a:1", "b:1")


def test_a_relay_that_stays_away_is_left_alone_for_longer() -> None:
    sources = ByteSources("hub:1", ["a:1"])
    relay = sources.choose(0.0)
    assert relay.failed(0.0, at_once=True)
    assert relay.failed(10.0, at_once=True)
    assert sources.choose(10.0 + 1.5 * AVOID_S[0]).is_hub
    relay.heard(40.0)
    assert relay.failed(50.0, at_once=True)
    assert sources.choose(50.0 + AVOID_S[0]) is relay
