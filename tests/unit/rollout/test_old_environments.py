"""Rollouts of the older verifiers API become samples in which no token is trained that was not sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "clients" / "verifiers_v0"))

from meshrl_verifiers_v0.samples import Calls, Sampled, rollout_of, samples_of

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import RolloutRequest

REQUEST = RolloutRequest(request_id="r", group_id="g", environment="old", task_index=0, group_size=1, deadline_s=1.0)


def step(call: str, prompt: list[int], completion: list[int]) -> dict[str, object]:
    logprobs = [-0.5] * len(completion)
    tokens = {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": logprobs}
    message = SimpleNamespace(content="hi", finish_reason="stop")
    return {"tokens": tokens, "response": SimpleNamespace(id=call, message=message)}


def test_a_turn_that_continues_the_tokens_of_the_one_before_extends_its_sample_and_any_other_begins_one():
    calls = Calls({"a": Sampled([(0, 2, 3)]), "b": Sampled([(0, 1, 3), (1, 2, 4)], 2), "c": Sampled([(0, 1, 5)])})
    steps = [step("a", [1, 2], [3, 4]), step("b", [1, 2, 3, 4, 9], [5, 6]), step("c", [1, 2, 8], [7])]
    first, second = samples_of(steps, calls, 0.5)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert first.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert np.allclose(first.logprobs, [0, 0, -0.5, -0.5, 0, -0.5, -0.5])
    assert [(span.start, span.end, span.version, span.prompt_version) for span in first.version_spans] == [
        (2, 4, 3, None),
        (5, 6, 3, 2),
        (6, 7, 4, None),
    ]
    assert (second.token_ids.tolist(), second.temperature) == ([1, 2, 8, 7], 0.5)
    assert [(span.start, span.end, span.version) for span in second.version_spans] == [(3, 4, 5)]


def test_a_state_becomes_a_rollout_that_can_be_trained_and_a_failed_one_says_why():
    timing = SimpleNamespace(scoring=SimpleNamespace(start=1.0, end=1.5))
    state = {"reward": 0.75, "metrics": {"right": 1.0}, "trajectory": [step("a", [1], [2])], "timing": timing}
    calls = Calls({"a": Sampled([(0, 1, 0)])})
    rollout = rollout_of(state, calls, REQUEST, key="k", temperature=1.0)
    assert (rollout.reward, rollout.metrics, rollout.num_turns, rollout.completion) == (0.75, {"right": 1.0}, 1, "hi")
    assert rollout_problems(rollout, vocab_size=10) == ()
    for wrong, words in (({"error": ValueError("no")}, "ValueError: no"), ({"reward": float("nan")}, "not a finite")):
        with pytest.raises(MeshError, match=words) as caught:
            rollout_of({**state, **wrong}, calls, REQUEST, key="k", temperature=1.0)
        assert caught.value.reason is Reason.ENVIRONMENT_FAILED
    calls.failure = MeshError(Reason.ENGINE_FAILED, "gone")
    with pytest.raises(MeshError, match="gone"):
        rollout_of(state, calls, REQUEST, key="k", temperature=1.0)
