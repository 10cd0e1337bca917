"""What the log says of rollouts that fail, one after the other, in the same way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger

from meshrl.rollout.trouble_log import FailureLog
from meshrl.wire.types import RolloutFailure


@pytest.fixture
def lines() -> Iterator[list[tuple[str, str]]]:
    """Level and text of each line."""
    said: list[tuple[str, str]] = []
    sink = logger.add(
        lambda message: said.append((message.record["level"].name, message.record["message"])), level="DEBUG"
    )
    yield said
    logger.remove(sink)


def failure(number: int, message: str) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=f"r{number}", group_id="g", reason="ENGINE_FAILED", message=message, retryable=True
    )


def test_the_first_failure_is_said_at_once_and_those_like_it_as_a_count(lines: list[tuple[str, str]]) -> None:
    log = FailureLog()
    for number in range(300):
        log.add("copy", failure(number, f"http://host:8000 failed for {number} s: 500"), now_s=number / 100)
        log.log_counts(number / 100)
    log.add("copy", failure(300, "the reply is empty"), now_s=4.0)
    log.add("sums", failure(301, "http://host:8000 failed for 1 s: 500"), now_s=4.0)
    log.log_counts(59.0)
    log.log_counts(60.5)
    assert [text for level, text in lines if level == "WARNING"] == [
        "rollout r0 of copy failed: ENGINE_FAILED: http://host:8000 failed for 0 s: 500",
        "rollout r300 of copy failed: ENGINE_FAILED: the reply is empty",
        "rollout r301 of sums failed: ENGINE_FAILED: http://host:8000 failed for 1 s: 500",
        "299 more rollouts of copy failed in that way, the last with ENGINE_FAILED:"
        " http://host:8000 failed for 299 s: 500",
    ]
    assert sum(level == "DEBUG" for level, _ in lines) == 299


def test_after_a_minute_without_one_the_next_failure_is_said_in_full_again(lines: list[tuple[str, str]]) -> None:
    log = FailureLog()
    log.add("copy", failure(1, "no"), now_s=0.0)
    log.log_counts(61.0)
    log.add("copy", failure(2, "no"), now_s=70.0)
    assert [text for _, text in lines] == [f"rollout r{number} of copy failed: ENGINE_FAILED: no" for number in (1, 2)]


def test_what_was_not_told_yet_is_told_when_the_service_ends(lines: list[tuple[str, str]]) -> None:
    log = FailureLog()
    for number in range(3):
        log.add("copy", failure(number, "no"), now_s=0.0)
    log.log_counts(1.0, every_s=0.0)
    assert lines[-1] == ("WARNING", "2 more rollouts of copy failed in that way, the last with ENGINE_FAILED: no")
