"""A probe is refused where its logprobs are far from the trainer's, by a bound or by what was usual."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.inference.agent.probe import KNOWN_AFTER, LEARNED_FROM, ProbeRule
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionProbe

LOGPROBS = (-1.0, -5.0, -1.0, -5.0)  # 2 nats from their mean each
PROBE = VersionProbe(token_ids=(1, 2, 3, 4, 5), logprobs=LOGPROBS)


def scored(off: float) -> np.ndarray:
    """What an engine gives that is `off` for each token."""
    return np.array([np.nan, *(each + off for each in LOGPROBS)], np.float32)


def refuses(rule: ProbeRule, off: float) -> bool:
    try:
        rule.judge(PROBE, [scored(off)])
    except MeshError as error:
        return error.reason is Reason.ENGINE_FAILED
    return False


def test_first_versions_may_be_half_of_the_spread_away() -> None:
    rule = ProbeRule()
    assert rule.judge(PROBE, [scored(-0.9)]) == pytest.approx(0.9)
    assert refuses(rule, 1.1)


def test_later_versions_may_be_a_few_times_as_far_as_the_first_ones() -> None:
    rule = ProbeRule()
    for off in (0.01, 0.02, 0.01)[:KNOWN_AFTER]:
        rule.judge(PROBE, [scored(off)])
    assert not refuses(rule, 0.15)
    for _ in range(LEARNED_FROM):
        rule.judge(PROBE, [scored(0.02)])
    assert refuses(rule, 1.21)
    quiet = ProbeRule()
    for _ in range(LEARNED_FROM):
        quiet.judge(PROBE, [scored(1e-6)])
    assert (refuses(quiet, 0.04), refuses(quiet, 0.06)) == (False, True)


def test_slow_drift_does_not_become_usual() -> None:
    rule, refused = ProbeRule(), 0
    for step in range(100):
        refused += refuses(rule, 0.01 + 0.01 * step)
    assert refused > 0


def test_bound_that_is_given_is_the_only_one() -> None:
    rule = ProbeRule(0.3)
    assert (refuses(rule, 0.29), refuses(rule, 0.31), refuses(rule, 0.29)) == (False, True, False)


def test_the_worst_copy_counts_and_what_is_no_number_is_refused() -> None:
    assert ProbeRule().judge(PROBE, [scored(0.0), scored(0.5)]) == pytest.approx(0.5)
    with pytest.raises(MeshError, match="nan nats"):
        ProbeRule().judge(PROBE, [scored(0.0), scored(float("nan"))])


def test_engine_of_a_shorter_context_is_compared_over_what_it_can_score() -> None:
    assert ProbeRule().judge(PROBE, [scored(0.25)[:3]]) == pytest.approx(0.25)
