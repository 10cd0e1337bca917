"""The examples' games, played by a policy that answers token by token as a test tells it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from meshrl.environments.memory_game.game import games
from meshrl.environments.nim.game import heaps, right_move
from meshrl.environments.word_trail.demonstrations import rows
from meshrl.environments.word_trail.trail import trails
from transformers import PreTrainedTokenizerFast

from conversations import load_conversations
from meshrl.sft.config import DataConfig
from meshrl.sft.data.tokenization import ConversationTokenizer
from meshrl_examples.demonstrations import write_demonstrations
from meshrl_examples.model import create_tokenizer
from meshrl_examples.similarity import similarity

# verifiers 0.4 passes an argument of tenacity by its old name when it connects to a tool server.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")

Answer = Callable[[web.Request, dict[str, Any]], web.Response]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer(tool_calls=True)


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
    rollout, _ = await mesh.collect(request)
    assert getattr(rollout, "message", "") == ""
    assert rollout.num_turns == 3
    words = games("held_out")[5]
    rights = [" ".join(words[: turn + 1]) for turn in range(3)]
    said = [policy(words[: turn + 1]) for turn in range(3)]
    assert rollout.reward == pytest.approx(sum(map(similarity, said, rights)) / 3)
    assert rollout.metrics["exact"] == float(not newest_first)
    (sample,) = rollout.samples  # each turn goes on from the tokens of the one before
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "".join(f"{text}<|im_end|>" for text in said)


@pytest.mark.parametrize(
    ("heap", "agents"),
    [(8, [("first", 0.0), ("second", 1.0)]), (3, [("first", 1.0)])],  # who won at once had nobody to play with
)
async def test_each_player_who_moved_makes_a_rollout_under_its_own_name(
    heap: int, agents: list[tuple[str, float]], start_mesh, make_group, engine, tokenizer, folder
):
    engine.on_call = answering(tokenizer, lambda prompt: str(right_move(int(said_by_user(prompt)[-1])) or 1))
    mesh = await start_mesh([engine], env=[{"id": "nim"}], tokenizer=folder, seq_len=128)
    request = make_group(environment="nim", task_index=heaps("train").index(heap), deadline_s=60.0)
    *rollouts, _ = await mesh.collect(request)
    assert sorted((rollout.agent, rollout.reward) for rollout in rollouts) == agents
    assert len({rollout.episode_id for rollout in rollouts}) == 1


async def test_a_trail_is_followed_with_the_tool_in_the_tokens_of_the_demonstrations(
    start_mesh, make_group, engine, tokenizer, folder, tmp_path
):
    number = next(index for index, trail in enumerate(trails("held_out")) if trail.steps == 2)
    trail = trails("held_out")[number]

    def policy(prompt: str) -> str:
        (asked, *told) = [text.strip() for text in prompt.split("<|im_start|>user")[1:]]
        word = told[-1].split("\n")[1] if told else asked.split()[0]
        if len(told) == trail.steps:
            return word
        return f'<tool_call>\n{{"name": "after", "arguments": {{"word": "{word}"}}}}\n</tool_call>'

    engine.on_call = answering(tokenizer, policy)
    mesh = await start_mesh(
        [engine],
        env=[{"id": "word_trail", "args": {"split": "held_out"}}],
        renderer={"name": "default", "tool_parser": "qwen3"},
        tokenizer=folder,
        seq_len=256,
    )
    request = make_group(environment="word_trail", task_index=number, deadline_s=60.0)
    rollout, _ = await mesh.collect(request)
    assert getattr(rollout, "message", "") == ""
    assert rollout.num_turns == 3
    assert rollout.reward == 1.0
    assert rollout.metrics["tool_calls"] == 2
    (sample,) = rollout.samples
    write_demonstrations(rows, tmp_path / "data", share=0.3, seed=0)
    row = load_conversations(DataConfig(name=str(tmp_path / "data" / "val.jsonl")))[number]
    shown = ConversationTokenizer(tokenizer, None, learned_roles=frozenset({"assistant"}))(row)
    assert sample.token_ids.tolist() == shown.token_ids.tolist()[: len(sample.token_ids)]
    assert tokenizer.decode(shown.token_ids[len(sample.token_ids) :]) == "\n"
    assert sample.loss_mask.tolist() == shown.loss_mask.tolist()[: len(sample.token_ids)]
    assert [span.role for span in sample.message_spans] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    said = [tokenizer.decode(sample.token_ids[span.content_start : span.content_end]) for span in sample.message_spans]
    assert said[1] == trail.prompt
    assert [said[3], said[5]] == trail.words[1:]
