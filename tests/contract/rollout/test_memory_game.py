"""The memory game, played by a policy that answers token by token as a test tells it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from meshrl.environments.memory_game.game import games
from transformers import PreTrainedTokenizerFast

from meshrl_examples.model import create_tokenizer
from meshrl_examples.similarity import similarity

Answer = Callable[[web.Request, dict[str, Any]], web.Response]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer()


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def answering(tokenizer: PreTrainedTokenizerFast, policy: Callable[[str], str]) -> Answer:
    """Makes an engine say what `policy` makes of the prompt's text."""

    def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        said = policy(tokenizer.decode(body["token_ids"]))
        token_ids = [*tokenizer.encode(said), tokenizer.eos_token_id]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in token_ids]
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    return answer


def said_by_user(prompt: str) -> list[str]:
    return [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>user\n")[1:]]


@pytest.mark.parametrize("newest_first", [False, True])
async def test_the_memory_game_has_three_turns(newest_first, start_mesh, make_group, engine, tokenizer, folder):
    def policy(words: list[str]) -> str:
        return " ".join(reversed(words) if newest_first else words)

    engine.on_call = answering(tokenizer, lambda prompt: policy(said_by_user(prompt)))
    env = [{"id": "memory_game", "args": {"split": "held_out"}}]
    mesh = await start_mesh([engine], env=env, tokenizer=folder, seq_len=128)
    request = make_group(environment="memory_game", task_index=5, deadline_s=60.0)
    rollout, _ = [event async for event in mesh.client.run_rollouts(request)]
    assert getattr(rollout, "message", "") == ""
    assert rollout.num_turns == 3
    words = games("held_out")[5]
    rights = [" ".join(words[: turn + 1]) for turn in range(3)]
    said = [policy(words[: turn + 1]) for turn in range(3)]
    assert rollout.reward == pytest.approx(sum(map(similarity, said, rights)) / 3)
    assert rollout.metrics["exact"] == float(not newest_first)
    (sample,) = rollout.samples  # each turn goes on from the tokens of the one before
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "".join(f"{text}<|im_end|>" for text in said)
