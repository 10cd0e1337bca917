"""Spans from the pauses that vLLM's scheduler counted; needs no vLLM."""

from meshrl.inference.vllm.version_clock import VersionClock
from meshrl.wire.types import VersionSpan


def test_prompt_computed_before_a_change_of_weights_is_said_on_the_first_span() -> None:
    clock = VersionClock(1)
    for version in (2, 3):
        clock.serve(version)
        clock.resumed()
    parcel = {"first_pause": 0, "prompt_pause": 0, "resumed_at": [0, 2]}
    assert clock.spans(parcel, 5) == (
        VersionSpan(start=0, end=2, version=2, prompt_version=1),
        VersionSpan(start=2, end=5, version=3),
    )


def test_pause_without_new_weights_says_nothing_of_the_prompt() -> None:
    clock = VersionClock(1)
    clock.resumed()
    parcel = {"first_pause": 0, "prompt_pause": 0, "resumed_at": [0]}
    assert clock.spans(parcel, 5) == (VersionSpan(start=0, end=5, version=1),)
    assert clock.spans({"first_pause": 1, "resumed_at": []}, 5) == (VersionSpan(start=0, end=5, version=1),)
