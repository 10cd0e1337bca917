"""Engines get calls in proportion to the tokens/s that they make, by a made-up clock and engines that share their time
among the calls that they have."""

from __future__ import annotations

from collections import Counter

import pytest

from meshrl.rollout.engines.engine_rate import FADES_S, LEAST_SHARE, EngineRate, RunningCall, mean_rate
from meshrl.rollout.engines.engine_table import EngineTable, KnownEngine, Requirement

TOKENS = 100


class Engines:
    """A table of engines that make these tokens/s, whatever the number of calls they have."""

    def __init__(self, speed: dict[str, float]) -> None:
        self.now_s, self.speed = 0.0, speed
        self.table = EngineTable(speed, clock=lambda: self.now_s)
        for url in speed:
            self.table.observe(url, 0)
        self._calls: list[tuple[KnownEngine, RunningCall, list[float]]] = []

    def run(self, calls: int, at_once: int) -> Counter[str]:
        """How many of so many calls each engine had; `at_once` of them are under way."""
        had: Counter[str] = Counter()
        for _ in range(calls):
            while len(self._calls) >= at_once:
                self._finish_one()
            engine = self.table.select(Requirement())
            assert engine is not None
            had[engine.url] += 1
            self._calls.append((engine, engine.rate.began(self.now_s), [TOKENS]))
        return had

    def _finish_one(self) -> None:
        def rate(engine: KnownEngine) -> float:
            return self.speed[engine.url] / engine.in_flight

        soonest = min(left[0] / rate(engine) for engine, _, left in self._calls)
        self.now_s += soonest
        for engine, _, left in self._calls:
            left[0] -= soonest * rate(engine)
        done = min(self._calls, key=lambda call: call[2][0])
        self._calls.remove(done)
        engine, running, _ = done
        self.table.sampled(engine.url, engine.rate.ended(running, self.now_s), TOKENS)


@pytest.mark.parametrize("at_once", [6, 24])
def test_an_engine_of_half_the_speed_has_half_the_calls(at_once: int) -> None:
    engines = Engines({"fast": 200.0, "slow": 100.0})
    engines.run(60, at_once)
    had = engines.run(300, at_once)
    assert had["fast"] / had["slow"] == pytest.approx(2.0, rel=0.2)


def test_engines_of_one_speed_share_the_calls() -> None:
    engines = Engines({"a": 100.0, "b": 100.0})
    had = engines.run(300, 8)
    assert had["a"] == pytest.approx(150, abs=15)


def test_an_engine_that_was_slow_for_a_while_is_found_to_be_fast_again() -> None:
    engines = Engines({"a": 200.0, "b": 200.0})
    engines.speed["b"] = 10.0
    engines.run(200, 8)
    assert engines.run(100, 8)["b"] < 20
    engines.speed["b"] = 200.0
    engines.run(200, 8)
    assert engines.run(200, 8)["b"] > 80


def test_a_new_engine_counts_as_much_as_the_mean_of_the_others() -> None:
    engines = Engines({"fast": 300.0, "slow": 100.0})
    engines.run(100, 16)
    engines.table.discover([("fast", ""), ("slow", ""), ("new", "")])
    engines.table.observe("new", 0)
    rates = {engine.url: engine.rate for engine in engines.table.listed}
    mean = mean_rate(rates.values())
    assert mean == pytest.approx(200.0, rel=0.2)
    assert rates["new"].estimate(mean, engines.now_s) == mean


def test_an_engine_that_gets_few_calls_is_not_taken_for_a_slow_one() -> None:
    busy, idle = EngineRate(), EngineRate()
    calls = [busy.began(0.0) for _ in range(4)]
    for call in calls:  # each of four has a quarter of 100 tokens/s
        busy.sampled(busy.ended(call, 4.0), TOKENS, 4.0)
    idle.sampled(idle.ended(idle.began(0.0), 1.0), TOKENS, 1.0)
    assert busy.tokens_per_s == pytest.approx(100.0)
    assert idle.tokens_per_s == pytest.approx(100.0)


def test_what_an_engine_once_was_fades_and_none_counts_for_nothing() -> None:
    rate = EngineRate()
    for second in range(20):
        rate.sampled(rate.ended(rate.began(second), second + 1.0), 1, second + 1.0)
    assert rate.estimate(100.0, 20.0) == 100.0 * LEAST_SHARE
    assert rate.estimate(100.0, 20.0 + 10 * FADES_S) == pytest.approx(100.0, rel=0.02)
