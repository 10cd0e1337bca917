"""Each metric is declared once, by the program that fills it."""

import pytest

from meshrl.core.metrics.catalogue import Catalogue, Metric, Source, UndeclaredMetricError
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import CONSOLE_FIELDS
from meshrl.orchestrator.bench.summary import ROWS


def metric(name: str, *sources: Source, statistics: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, unit="s", meaning="a test", filled_by=sources, statistics=statistics)


def test_a_name_that_is_not_declared_cannot_be_filled() -> None:
    with pytest.raises(UndeclaredMetricError, match=r"'reward/all/median' of the orchestrator is not declared"):
        CATALOGUE.record(Source.ORCHESTRATOR, {"reward/all/mean": 1.0, "reward/all/median": 1.0})


def test_a_source_cannot_fill_the_name_of_another() -> None:
    with pytest.raises(UndeclaredMetricError, match="'progress/tokens' is filled by orchestrator, not by trainer"):
        CATALOGUE.record(Source.TRAINER, {"progress/tokens": 1.0})


def test_names_of_environments_may_be_any() -> None:
    names = ("reward/a/b\nc/mean", "metrics/math/pass@1/mean", "reward_parts//x/mean", "eval/my env/avg@16")
    assert CATALOGUE.record(Source.ORCHESTRATOR, dict.fromkeys(names, 1.0)).keys() == set(names)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([metric("a", Source.SFT), metric("a", Source.TRAINER)], "'a' is declared twice"),
        ([metric("a/mean", Source.SFT), metric("a", Source.SFT, statistics=("mean",))], "'a/mean' is declared twice"),
        ([metric("a", Source.ORCHESTRATOR, Source.TRAINER)], "'a' cannot be filled by both"),
    ],
)
def test_two_sources_of_a_record_cannot_share_a_name(metrics: list[Metric], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Catalogue(metrics)


def test_what_is_shown_is_declared() -> None:
    shown = [name for name, *_ in (*CONSOLE_FIELDS, *ROWS)]
    assert [name for name in shown if CATALOGUE.find(name) is None] == []


def test_every_declaration_says_what_and_in_which_unit() -> None:
    assert [one.name for one in CATALOGUE.metrics if not (one.unit and one.meaning and one.filled_by)] == []
