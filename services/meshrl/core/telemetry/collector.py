"""Sends spans to a collector that may be away or busy for a while: batches that it refuses are kept and sent again.

It is between a program's tracing and OpenTelemetry's exporter, on the thread of the span processor. It keeps a bounded
number of spans; lost ones are counted and logged. All spans are in traces/ of the output folder as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from loguru import logger
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

HELD_SPANS = 32_768
RETRY_S = (1.0, 30.0)
TRIES = 20
"""So often a batch is sent before it is given up: it may be one that the collector never takes."""
SAY_EVERY_S = 60.0


class CollectorExporter(SpanExporter):
    """Hands batches to `inner` in order. Called by one thread at a time; `export` never fails."""

    def __init__(
        self,
        inner: SpanExporter,
        *,
        most: int = HELD_SPANS,
        close_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`most` spans are held, the latest; at its end it goes on for `close_s`. `now` gives seconds."""
        self._inner, self._most, self._close_s = inner, most, close_s
        self._now, self._sleep = now, sleep
        self._held: deque[Sequence[ReadableSpan]] = deque()
        self._count = 0
        self._tries = 0
        self._retry_s, self._retry_at_s = RETRY_S[0], 0.0
        self._lost, self._said_at_s = 0, 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Takes a batch, and sends what is held unless the collector has just refused some."""
        self._held.append(spans)
        self._count += len(spans)
        while self._count > self._most and len(self._held) > 1:
            self._lose()
        if self._now() >= self._retry_at_s:
            self._send()
        if self._lost and self._now() >= self._said_at_s + SAY_EVERY_S:
            self._say_lost()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Sends what is held within `close_s`; says what could not be sent."""
        end_s = self._now() + self._close_s
        while not self._send() and self._now() < end_s:
            self._sleep(RETRY_S[0])
        self._inner.shutdown()
        while self._held:
            self._lose()
        if self._lost:
            self._say_lost()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True when nothing is left to send."""
        return self._send()

    def _send(self) -> bool:
        """Sends from the oldest on, until one is refused; True when all are sent."""
        while self._held:
            if self._inner.export(self._held[0]) is SpanExportResult.SUCCESS:
                self._count -= len(self._held.popleft())
                if self._tries:
                    logger.info("the collector takes spans again, {} are held", self._count)
                self._tries, self._retry_s, self._retry_at_s = 0, RETRY_S[0], 0.0
                continue
            if not self._tries:
                logger.warning(
                    "the collector takes no spans now: up to {} are held and sent when it does; traces/ of the output"
                    " folder has them, too",
                    self._most,
                )
            self._tries += 1
            if self._tries >= TRIES:
                self._lose()
            self._retry_at_s = self._now() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])
            return False
        return True

    def _lose(self) -> None:
        """Gives up the oldest batch."""
        lost = len(self._held.popleft())
        self._count -= lost
        self._lost += lost
        self._tries = min(self._tries, 1)  # what comes next has not been tried, but the collector is known to be away

    def _say_lost(self) -> None:
        logger.warning(
            "{} spans did not reach the collector (OTEL_EXPORTER_OTLP_ENDPOINT), which took too little for too long;"
            " they are in traces/ of the output folder",
            self._lost,
        )
        self._lost, self._said_at_s = 0, self._now()
