"""Rollouts of the older verifiers API are scored; no token of their samples is trained that was not sampled."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "clients" / "verifiers_v0"))

from meshrl_verifiers_v0 import config
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


class OldEnv:
    """An environment of the older API, and its rubric: a rollout's reward is its number, in a group its rank."""

    requires_group_rollouts = True

    def __init__(self, ends: list[BaseException | None]) -> None:
        """How each rollout ends: None is well, a MeshError is its engine's."""
        self.rubric = self
        self.ends = iter(enumerate(ends))
        self.cleaned: list[int] = []

    def get_dataset(self) -> list[dict[str, object]]:
        return [{"prompt": "hi"}]

    def set_max_seq_len(self, tokens: int) -> None: ...

    def set_score_rollouts(self, score: bool) -> None: ...

    async def rollout(self, row: dict[str, object], client: Any, model: str, args: dict[str, object]) -> dict[str, Any]:
        number, end = next(self.ends)
        if end is not None and not isinstance(end, MeshError):
            raise end
        client.calls.failure = end
        client.calls.sampled[str(number)] = Sampled([(0, 1, 0)])
        timing = SimpleNamespace(scoring=SimpleNamespace(start=0.0, end=0.0))
        return {"number": number, "trajectory": [step(str(number), [1], [2])], "timing": timing}

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = float(state["number"])

    async def score_group(self, states: list[dict[str, Any]]) -> None:
        for rank, state in enumerate(states, 1):
            state["reward"] = rank / len(states)

    async def cleanup(self, state: dict[str, Any]) -> None:
        self.cleaned.append(state["number"])


def hosted(monkeypatch: pytest.MonkeyPatch, env: OldEnv) -> Any:
    client = ModuleType("verifiers.clients.openai_chat_completions_client")  # verifiers before 0.2 has it
    client.OpenAIChatCompletionsClient = type("Client", (), {"__init__": lambda self, openai: None})  # type: ignore[attr-defined]  # a module that is made here
    monkeypatch.setitem(sys.modules, "verifiers.clients", ModuleType("verifiers.clients"))
    monkeypatch.setitem(sys.modules, client.__name__, client)
    hosting = importlib.import_module("meshrl_verifiers_v0.hosting")
    return hosting.HostedOldEnv(config.OldEnv(id="old"), env, None, "m", 16)


async def test_a_rollout_is_scored_by_itself_and_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    env = OldEnv([None, None, MeshError(Reason.ENGINE_FAILED, "gone")])
    old = hosted(monkeypatch, env)
    rewards = [(await old.play(old.row(REQUEST), REQUEST, index)).reward for index in range(2)]
    assert (rewards, env.cleaned) == ([0.0, 1.0], [0, 1])
    with pytest.raises(MeshError, match="gone"):
        await old.play(old.row(REQUEST), REQUEST, 2)


async def test_a_group_is_scored_together_without_those_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    env = OldEnv([None, ValueError("no"), MeshError(Reason.ENGINE_FAILED, "gone"), None])
    old = hosted(monkeypatch, env)
    request = replace(REQUEST, group_size=4)
    first, wrong, gone, last = [one async for one in old.play_group(old.row(request), request)]
    assert (first.reward, last.reward) == (0.5, 1.0)
    assert (wrong.reason, wrong.message) == (Reason.ENVIRONMENT_FAILED, "ValueError: no")
    assert (gone.reason, gone.message) == (Reason.ENGINE_FAILED, "gone")
    assert env.cleaned == [0, 2, 3]
