"""Routes of experts on the wire: their types, frames, digests, and rollouts that come in parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshrl.wire import completion_frame, convert
from meshrl.wire.completion_frame import CompletionFrame, FrameChoice
from meshrl.wire.convert import rollouts as converted
from meshrl.wire.trainable import rollout_problems, routes_problem
from meshrl.wire.types import Rollout, RolloutFailure, RoutedShape, Sample, VersionSpan
from meshrl.wire.types.routes import Routes, joined, narrowed, signed

SHAPE = RoutedShape(layers=3, per_token=2, experts=8)


def routes(tokens: int, experts: int = 8, seed: int = 0) -> Routes:
    chosen = np.random.default_rng(seed).integers(0, experts, (tokens, SHAPE.layers, SHAPE.per_token))
    chosen[-1] = -1
    return narrowed(chosen, experts)


def rollout(*lengths: int) -> Rollout:
    samples = tuple(
        Sample(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.arange(length) > 0,
            logprobs=np.where(np.arange(length) > 0, -1.0, 0.0).astype(np.float32),
            version_spans=(VersionSpan(start=0, end=length, version=1),),
            routed_experts=routes(length, seed=length),
        )
        for length in lengths
    )
    return Rollout(rollout_id="r", group_id="g", task_key="t", environment="e", samples=samples, reward=1.0)


@pytest.mark.parametrize(("experts", "dtype", "unknown"), [(8, "uint8", 255), (255, "uint8", 255), (256, "int16", -1)])
def test_the_narrowest_type_has_room_for_an_unknown_choice(experts: int, dtype: str, unknown: int) -> None:
    made = narrowed(np.array([[[experts - 1, -1]]]), experts)
    assert made.dtype == dtype
    assert made.tolist() == [[[experts - 1, unknown]]]
    assert signed(made).tolist() == [[[experts - 1, -1]]]


def test_stretches_of_both_types_are_joined_and_gaps_are_unknown() -> None:
    narrow, wide = routes(2), routes(3, 300)
    made = joined([(1, None), (2, narrow), (3, wide)])
    assert made is not None
    assert made.dtype == np.int16
    assert (made[0] == -1).all()
    np.testing.assert_array_equal(made[1:3], signed(narrow))
    assert joined([(4, None)]) is None
    with pytest.raises(ValueError, match="different shapes"):
        joined([(2, narrow), (1, np.zeros((1, 1, 2), np.uint8))])


@pytest.mark.parametrize("experts", [8, 300])
def test_a_frame_carries_routes_of_either_type(experts: int) -> None:
    choice = FrameChoice(
        token_ids=np.array([5, 6], np.int32), logprobs=None, version_spans=(), finish_reason="length",
        routed_experts=routes(4, experts),
    )  # fmt: skip
    frame = CompletionFrame(request_id="a", prompt_tokens=3, choices=(choice, replace(choice, routed_experts=None)))
    first, second = completion_frame.decode(completion_frame.encode(frame)).choices
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == choice.routed_experts.dtype
    np.testing.assert_array_equal(first.routed_experts, choice.routed_experts)
    assert second.routed_experts is None


@pytest.mark.parametrize("limit", [1, 12, 60, 10_000])
def test_a_rollout_whose_routes_exceed_a_message_comes_in_parts(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(converted, "ROUTES_BYTES", limit)
    sent = rollout(5, 11)
    messages = convert.rollout_messages(sent)
    assert (len(messages) > 1) == (limit < 16 * 6)
    sizes = [len(each.routed_experts_part.routed_experts.data) for each in messages[:-1]]
    assert all(size <= max(limit, 6) for size in sizes)
    reader = convert.RolloutReader()
    *parts, whole = [reader.read(message) for message in messages]
    assert all(part is None for part in parts)
    assert isinstance(whole, Rollout)
    for one, other in zip(whole.samples, sent.samples, strict=True):
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_parts_that_do_not_fit_their_rollout_make_it_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "ROUTES_BYTES", 12)
    _, *messages = convert.rollout_messages(rollout(5))
    reader = convert.RolloutReader()
    failure = [reader.read(message) for message in messages][-1]
    assert isinstance(failure, RolloutFailure)
    assert "samples[0].routed_experts: must have 5 rows like token_ids, got 3 in parts" in failure.message


def test_routes_of_another_model_are_named() -> None:
    assert routes_problem(None, SHAPE) is None
    assert routes_problem(routes(3), SHAPE) is None
    assert "must be of 3 layers and 2 experts" in (routes_problem(np.zeros((3, 2, 2), np.uint8), SHAPE) or "")
    assert "must be experts below 8" in (routes_problem(np.full((1, 3, 2), 8, np.uint8), SHAPE) or "")
    bad = replace(rollout(4), samples=(replace(rollout(4).samples[0], routed_experts=np.zeros((4, 1, 1), np.uint8)),))
    assert [field for field, _ in rollout_problems(bad, vocab_size=None, routed=SHAPE)] == ["samples[0].routed_experts"]
    assert rollout_problems(bad, vocab_size=None) == ()
