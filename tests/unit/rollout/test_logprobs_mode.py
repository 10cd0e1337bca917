"""Which sampling changes the distribution, and which engines may then be asked."""

import pytest

from meshrl.rollout.engines.engine_table import EngineTable, Requirement
from meshrl.rollout.engines.logprobs_mode import logprobs_mode_of, reshaping
from meshrl.wire.types import Sampling

SHAPED = Requirement(reshaped_by=("top_p = 0.9",))


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(), ()),
        (Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0), ()),
        (Sampling(top_k=-1), ()),
        (Sampling(temperature=0.7), ("temperature = 0.7",)),
        (Sampling(temperature=0.0), ("temperature = 0",)),
        (Sampling(top_p=0.8999999761581421), ("top_p = 0.9",)),
        (Sampling(top_k=20, min_p=0.05), ("top_k = 20", "min_p = 0.05")),
    ],
)
def test_settings_that_change_the_distribution_are_named(sampling: Sampling, named: tuple[str, ...]) -> None:
    assert reshaping(sampling) == named


def test_an_engine_says_what_its_logprobs_are_or_says_nothing() -> None:
    assert logprobs_mode_of({"version": 1, "logprobs_mode": "raw_logprobs"}) == "raw_logprobs"
    assert [logprobs_mode_of(payload) for payload in ({"version": "0.26"}, {"logprobs_mode": 3}, [], None)] == [
        None
    ] * 4


def pool(**modes: str | None) -> EngineTable:
    engines = EngineTable(modes)
    for url, mode in modes.items():
        engines.observe(url, 0, mode)
    return engines


def test_reshaped_sampling_goes_to_engines_with_processed_logprobs_only() -> None:
    engines = pool(raw="raw_logprobs", unknown=None, right="processed_logprobs")
    engines.listed[2].rate.running = 9
    assert engines.select(SHAPED, prefer="raw").url == "right"
    assert engines.select(Requirement(), prefer="raw").url == "raw"
    assert engines.biased(SHAPED) == ()


def test_without_such_an_engine_the_request_is_biased_until_one_may_come_up() -> None:
    engines = pool(raw="raw_logprobs", unknown=None)
    assert not engines.can_meet(SHAPED)
    assert [engine.url for engine in engines.biased(SHAPED)] == ["raw", "unknown"]
    assert engines.biased(Requirement()) == ()
    engines.lose("raw")
    engines.lose("unknown")
    assert engines.biased(SHAPED) == ()  # nobody is up: the next one may be right


def test_an_engine_that_lags_behind_is_no_reason_to_refuse() -> None:
    engines = pool(right="processed_logprobs")
    need = Requirement(min_version=4, reshaped_by=("top_k = 5",))
    assert not engines.can_meet(need)
    assert engines.biased(need) == ()
