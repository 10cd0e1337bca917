"""nim, played by a policy that answers token by token as a test tells it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from meshrl.environments.nim.game import heaps, right_move

from meshrl_examples.model import create_tokenizer

TOKENIZER = create_tokenizer()


def playing(policy: Callable[[int], str]):
    """Makes an engine say what `policy` makes of the heap that was named last."""

    def answer(request: web.Request, body: dict) -> web.Response:
        prompt = TOKENIZER.decode(body["token_ids"])
        heap = int(prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
        token_ids = [*TOKENIZER.encode(policy(heap)), TOKENIZER.eos_token_id]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in token_ids]
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    return answer


@pytest.mark.parametrize(
    ("heap", "agents"),
    [(8, [("first", 0.0), ("second", 1.0)]), (3, [("first", 1.0)])],  # who won at once had nobody to play with
)
async def test_each_player_who_moved_makes_a_rollout_under_its_own_name(
    heap: int, agents: list[tuple[str, float]], start_mesh, make_group, engine, tmp_path: Path
) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    engine.on_call = playing(lambda heap: str(right_move(heap) or 1))
    folder = str(tmp_path / "tokenizer")
    mesh = await start_mesh([engine], env=[{"id": "nim"}], tokenizer=folder, seq_len=128)
    request = make_group(environment="nim", task_index=heaps("train").index(heap), deadline_s=60.0)
    *rollouts, _ = [event async for event in mesh.client.run_rollouts(request)]
    assert sorted((rollout.agent, rollout.reward) for rollout in rollouts) == agents
    assert len({rollout.episode_id for rollout in rollouts}) == 1
