"""Which engine a model call goes to."""

import asyncio

import pytest

from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.capacity import EngineCapacity, RolloutLimit
from meshrl.rollout.engines.engine_rate import CallTiming
from meshrl.rollout.engines.engine_table import EngineTable, Requirement
from meshrl.rollout.engines.router import EngineRouter, version_of


def pool(**versions: int | None) -> EngineTable:
    engines = EngineTable(versions)
    for url, version in versions.items():
        engines.observe(url, version)
    return engines


def test_the_least_loaded_engine_is_chosen():
    engines = pool(a=0, b=0)
    engines.listed[0].rate.running = 3
    assert engines.select(Requirement()).url == "b"


def test_a_session_stays_on_its_engine_while_that_fits():
    engines = pool(a=0, b=0)
    engines.listed[0].rate.running = 3
    assert engines.select(Requirement(), prefer="a").url == "a"
    engines.lose("a")
    assert engines.select(Requirement(), prefer="a").url == "b"


def test_only_engines_with_a_version_that_is_new_enough_are_chosen():
    engines = pool(a=3, b=4, c=None)
    assert engines.select(Requirement(min_version=4)).url == "b"
    assert engines.select(Requirement(min_version=5)) is None
    assert engines.select(Requirement(exact_version=3)).url == "a"
    assert not engines.can_meet(Requirement(exact_version=2))


def test_an_engine_of_unknown_version_serves_requests_without_a_bound_only():
    engines = pool(c=None)
    assert engines.select(Requirement()).url == "c"
    assert engines.select(Requirement(min_version=0)) is None


def test_a_lost_engine_forgets_its_version_because_it_may_restart_older():
    engines = pool(a=7)
    engines.lose("a")
    assert engines.newest(Requirement()) is None
    assert engines.endpoints()[0].healthy is False


def test_waiting_is_useless_once_all_engines_are_past_the_exact_version():
    assert pool(a=4, b=5).is_past(Requirement(exact_version=3))
    assert not pool(a=2, b=5).is_past(Requirement(exact_version=3))
    assert not pool(a=4).is_past(Requirement(min_version=9))


def test_discovered_engines_come_and_go_but_configured_ones_stay():
    engines = EngineTable(["a"])
    engines.discover([("b", "big")])
    assert [(engine.url, engine.pool) for engine in engines.listed] == [("a", ""), ("b", "big")]
    engines.observe("b", 1)
    assert engines.select(Requirement(pool="big")).url == "b"
    engines.lose("b")
    engines.discover([("b", "big")])  # the hub has not noticed yet
    assert engines.select(Requirement(pool="big")) is None
    engines.discover([])
    assert [engine.url for engine in engines.listed] == ["a"]


def test_equals_take_turns():
    engines = pool(a=0, b=0, c=0)
    assert [engines.select(Requirement()).url for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    engines.listed[0].rate.running = 1
    assert [engines.select(Requirement()).url for _ in range(3)] == ["b", "c", "b"]


def placed(engines: EngineTable, *, groups: int, prompt_tokens: int) -> tuple[list[set[str]], list[int]]:
    """The engines that each of `groups` of eight rollouts began at, and the calls that each engine has then."""
    found: list[set[str]] = []
    for group in range(groups):
        found.append(set())
        for _ in range(8):
            engine = engines.select(Requirement(), group_id=str(group), prompt_tokens=prompt_tokens)
            engine.rate.running += 1
            found[-1].add(engine.url)
    return found, [engine.in_flight for engine in engines.listed]


def answering(tokens: int) -> EngineTable:
    """Four engines whose calls sample so many tokens."""
    engines = pool(a=0, b=0, c=0, d=0)
    for engine in engines.listed:
        engines.sampled(engine.url, CallTiming(seconds=1.0, beside=1.0), tokens)
    return engines


def test_rollouts_of_a_group_begin_at_one_engine_while_their_prompt_is_long():
    found, calls = placed(answering(200), groups=32, prompt_tokens=8000)
    assert sum(map(len, found)) < 40, "nearly each prompt is computed once"
    assert max(calls) - min(calls) <= 8
    found, calls = placed(answering(200), groups=32, prompt_tokens=20)
    assert sum(map(len, found)) > 64
    assert max(calls) - min(calls) <= 2


def test_few_groups_of_long_prompts_still_use_every_engine():
    found, calls = placed(answering(500), groups=2, prompt_tokens=8000)
    assert min(calls) > 0
    assert sum(map(len, found)) < 8, "an engine has two rollouts of a group, or more"


def test_a_group_begins_anywhere_where_its_engine_is_gone():
    engines = answering(200)
    first = engines.select(Requirement(), group_id="g", prompt_tokens=8000)
    engines.lose(first.url)
    other = engines.select(Requirement(), group_id="g", prompt_tokens=8000)
    assert other.url != first.url
    assert engines.select(Requirement(), group_id="g", prompt_tokens=8000) is other


def test_an_engine_with_calls_in_flight_is_remembered_while_it_is_off_the_list():
    engines = EngineTable([])
    engines.discover([("a", ""), ("b", "")])
    engines.observe("a", 1)
    busy = engines.listed[0]
    busy.rate.running = 2
    engines.discover([])
    assert engines.listed == ()
    assert engines.select(Requirement()) is None
    engines.discover([("a", "")])
    assert engines.listed == (busy,)
    assert engines.select(Requirement()) is None  # not looked at yet: it may hold another version now
    engines.observe("a", 2)
    assert (engines.select(Requirement(exact_version=2)), busy.in_flight) == (busy, 2)


def test_all_that_is_known_of_an_engine_goes_with_it():
    engines, limit = EngineTable([]), RolloutLimit(None)
    engines.discover([("a", "")])
    engines.observe("a", 1, None, EngineCapacity(slots=100, kv_tokens=100_000, preempted=5))
    engines.select(Requirement(), group_id="g", prompt_tokens=8000)
    limit.follow(engines.listed)
    assert limit.rollouts == 102, "preempted: 90, and an eighth"
    engines.discover([])
    engines.discover([("a", "")])  # another process, at the same address
    engines.observe("a", 1, None, EngineCapacity(slots=100, kv_tokens=100_000))
    limit.follow(engines.listed)
    assert limit.rollouts == 113
    assert not engines.listed[0].prompts


@pytest.mark.parametrize(
    ("payload", "version"),
    [({"version": 4}, 4), ({"version": None}, None), ({"version": "0.26.1"}, 0), ({}, 0), ([], 0)],
)
def test_the_version_of_an_engine_is_read_from_its_answer(payload: object, version: int | None):
    assert version_of(payload) == version


def test_calls_of_a_run_go_where_its_adapter_is_and_by_its_own_version() -> None:
    table = EngineTable(["http://one", "http://two", "http://whole"])
    table.observe("http://one", None, runs={"a": 4, "b": 9})
    table.observe("http://two", None, runs={"a": 5})
    table.observe("http://whole", 7)
    chosen = table.select(Requirement(run_id="a", min_version=5), skip=("http://whole",))
    assert chosen is not None
    assert chosen.url == "http://two"
    assert not table.can_meet(Requirement(run_id="b", exact_version=8))
    assert [e.url for e in table.candidates(Requirement()) if e.fits(Requirement(run_id="b"))] == [
        "http://one",
        "http://whole",  # it serves one policy to whoever asks
    ]
    assert table.newest(Requirement(run_id="b")) == 9
    table.lose("http://one")
    assert table.newest(Requirement(run_id="b")) == 7


async def test_an_engine_that_takes_connections_and_answers_nothing_is_named_with_a_reason():
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engines = EngineTable([url])
    async with server, EngineRouter(engines, ClientConfig(probe_deadline_s=0.1)):
        assert engines.listed[0].trouble == f"{url} does not answer: TimeoutError"
