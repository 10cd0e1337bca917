"""`synthesize` over an environment with a tool, from a server of /v1/chat/completions: what it keeps, and how it goes
on.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from meshrl.environments.word_trail.trail import trails
from opentelemetry.sdk.trace import TracerProvider

from http_servers import chat_answer, serving_http
from meshrl.sampling.groups import RolloutGroup
from meshrl.synthesize.config import SynthesisConfig
from meshrl.synthesize.dataset import ConversationDataset
from meshrl.synthesize.main import synthesize
from meshrl.trials.plan import Trial
from meshrl.trials.program import serve_trials
from meshrl.trials.results import TrialResults

TASKS, SIZE = 5, 2
TRAILS = trails("train")[:TASKS]
REFUSED, WRONG = TRAILS[1].prompt, TRAILS[2].prompt


class Player:
    """A server of /v1/chat/completions that follows trails with the tool; one it refuses, one it gets wrong."""

    def __init__(self) -> None:
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        prompt = messages[1]["content"]
        if prompt == REFUSED:
            return web.json_response({"error": {"message": "not this one"}}, status=400)
        start, steps = prompt.split()
        told = [message["content"] for message in messages if message["role"] == "tool"]
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": f"{len(told)} of {steps}"}
        if len(told) < int(steps):
            arguments = json.dumps({"word": told[-1] if told else start})
            call = {"id": f"call-{len(told)}", "type": "function"}
            message["tool_calls"] = [{**call, "function": {"name": "after", "arguments": arguments}}]
        else:
            message["content"] = "nowhere" if prompt == WRONG else told[-1]
        return chat_answer(body, message)


@pytest.fixture
async def player() -> AsyncIterator[str]:
    server = Player()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    async with serving_http(app) as url:
        yield f"{url}/v1"


class Stopping(TrialResults):
    """Asks for the end once so many trials have ended."""

    def __init__(self, config: SynthesisConfig, after: int | None = None) -> None:
        super().__init__(config.output_dir, config.result_settings())
        self.stop = asyncio.Event()
        self.played: list[tuple[int, int]] = []
        self._after = after

    def record(self, checkpoint: str, trial: Trial, group: RolloutGroup) -> list[dict[str, Any]]:
        self.played.append((trial.task, trial.number))
        if len(self.played) == self._after:
            self.stop.set()
        return super().record(checkpoint, trial, group)


async def run(config: SynthesisConfig, results: Stopping) -> int:
    tracer = TracerProvider().get_tracer("test")
    dataset = ConversationDataset(
        config.dataset_path,
        model=config.model.name,
        min_reward=config.min_reward,
        keep_truncated=config.keep_truncated,
        reasoning_field=config.reasoning_field,
    )
    work = partial(synthesize, dataset)
    return await serve_trials(config, results.stop, tracer, results=results, work=work)


@pytest.mark.timeout(900)  # imports and a tool server, on a machine that may be busy
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")  # of the MCP client
async def test_conversations_with_tools_are_kept_once_however_often_it_is_stopped(player: str, tmp_path: Path) -> None:
    config = SynthesisConfig.model_validate(
        {
            "model": {"name": "player"},
            "environment_ids": ["word_trail"],
            "num_examples": TASKS,
            "group_size": SIZE,
            "client": {"base_url": [player]},
            "min_reward": 1.0,
            "reasoning_field": "reasoning",
            "max_concurrent": 2,
            "workers": 0,
            "output_dir": tmp_path,
        }
    )
    begun = Stopping(config, after=4)
    assert await run(config, begun) == 1
    path = tmp_path / "dataset.jsonl"
    first = path.read_text()
    (tmp_path / "dataset.jsonl").write_text("".join(first.splitlines(keepends=True)[:-1]))  # as a kill may leave it
    resumed = Stopping(config)
    assert await run(config, resumed) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    right = [task for task, trail in enumerate(TRAILS) if trail.prompt not in (REFUSED, WRONG)]
    assert Counter(row["task"] for row in rows) == Counter(dict.fromkeys(right, SIZE))
    assert len({row["rollout_id"] for row in rows}) == len(rows) == SIZE * len(right)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "asked": TASKS * SIZE, "kept": len(rows), "dropped": {"reward": SIZE}, "failed": SIZE,
        "groups": TASKS, "failed_groups": 1,
    }  # fmt: skip
    again = set(begun.played) & set(resumed.played)
    assert {task for task, _ in again} <= {1}  # nothing that came to an end but what failed

    for row in rows:
        trail = TRAILS[row["task"]]
        system, user, *turns = row["messages"]
        assert (system["role"], user) == ("system", {"role": "user", "content": trail.prompt})
        asked = [json.loads(turn["tool_calls"][0]["function"]["arguments"])["word"] for turn in turns[:-1:2]]
        assert asked == trail.words[:-1]
        assert [turn["content"] for turn in turns[1::2]] == trail.words[1:]
        assert (turns[-1]["content"], turns[0]["reasoning"]) == (trail.words[-1], f"0 of {trail.steps}")
        (tool,) = json.loads(row["tools"])
        assert tool["function"]["name"] == "after"
