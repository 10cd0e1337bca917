"""Spans for a collector that is away for a while: held within a bound, sent in order, and what is lost is said."""

from collections.abc import Iterator, Sequence

import pytest
from loguru import logger
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from meshrl.core.telemetry.collector import TRIES, CollectorExporter


class Backend(SpanExporter):
    """Refuses everything while `away`, and what is in `never` always."""

    def __init__(self) -> None:
        self.away = False
        self.never: set[str] = set()
        self.got: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.away or self.never & {span.name for span in spans}:
            return SpanExportResult.FAILURE
        self.got += [span.name for span in spans]
        return SpanExportResult.SUCCESS


class Clock:
    """Moves on by hand, or by sleeping."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


def batch(*names: str) -> list[ReadableSpan]:
    return [ReadableSpan(name) for name in names]


def exporter(backend: Backend, clock: Clock, **more: float) -> CollectorExporter:
    return CollectorExporter(backend, most=6, close_s=5.0, now=clock.now, sleep=clock.sleep, **more)


def test_what_is_refused_is_sent_in_order_once_the_collector_is_back(said: list[str]) -> None:
    backend, clock = Backend(), Clock()
    sending = exporter(backend, clock)
    sending.export(batch("a"))
    backend.away = True
    assert sending.export(batch("b", "c")) is SpanExportResult.SUCCESS
    backend.away = False
    sending.export(batch("d"))
    assert backend.got == ["a"], "it has just refused some: it is not asked again at once"
    clock.now_s += 1.0
    sending.export(batch("e"))
    assert backend.got == ["a", "b", "c", "d", "e"]
    assert [line.split(" ", 3)[:3] for line in said] == [["the", "collector", "takes"]] * 2


def test_the_oldest_are_lost_beyond_the_bound_and_counted(said: list[str]) -> None:
    backend, clock = Backend(), Clock()
    sending = exporter(backend, clock)
    backend.away = True
    for number in range(5):
        sending.export(batch(f"{number}a", f"{number}b"))
    backend.away = False
    clock.now_s += 60.0
    sending.export(batch("last"))
    assert backend.got == ["3a", "3b", "4a", "4b", "last"]
    lost = [line for line in said if "did not reach the collector" in line]
    assert sum(int(line.split()[0]) for line in lost) == 6


def test_a_batch_that_is_never_taken_does_not_hold_up_the_others(said: list[str]) -> None:
    backend, clock = Backend(), Clock()
    backend.never = {"bad"}
    sending = exporter(backend, clock)
    sending.export(batch("bad"))
    for _ in range(TRIES):
        clock.now_s += 30.0
        sending.export(batch())
    sending.export(batch("good"))
    clock.now_s += 60.0
    sending.export(batch())
    assert backend.got == ["good"]
    assert any(line.startswith("1 spans did not reach the collector") for line in said)


def test_the_end_waits_for_a_collector_that_is_busy_but_not_for_one_that_is_gone(said: list[str]) -> None:
    backend, clock = Backend(), Clock()
    sending = exporter(backend, clock)
    backend.away = True
    sending.export(batch("a"))
    began_s = clock.now_s

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        backend.away = clock.now_s < began_s + 2.0

    sending._sleep = sleep
    sending.shutdown()
    assert backend.got == ["a"]

    backend.away = True
    gone = exporter(backend, clock)
    gone.export(batch("b"))
    began_s = clock.now_s + 60.0
    gone._sleep = sleep
    gone.shutdown()
    assert backend.got == ["a"]
    assert said[-1].startswith("1 spans did not reach the collector")
