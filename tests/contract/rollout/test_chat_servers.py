"""The policy behind /v1/chat/completions: evaluations are played, training is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from http_servers import chat_answer, serving_http
from inference_kit import make_model, served
from meshrl.core.config import ConfigError
from meshrl.rollout.engines.chat_servers import api_url
from meshrl.wire.errors import Reason
from meshrl.wire.types import Sampling

VOCABULARY = 101  # of the fixture's tokenizer


@pytest.fixture
async def inference(tokenizer_dir) -> AsyncIterator[str]:
    """Our own inference program's HTTP, with a small model on the embedded engine."""
    async with served(
        make_model(vocab_size=VOCABULARY, eos_token_id=2), AutoTokenizer.from_pretrained(tokenizer_dir)
    ) as server:
        yield server.url


class ChatServer:
    """Answers /v1/chat/completions with "cat", or with the statuses that it is given first."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.silent = False
        self.key = ""
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        locked = self.key and request.headers.get("Authorization") != f"Bearer {self.key}"
        return web.json_response({"object": "list", "data": []}, status=401 if locked else 200)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.headers["Authorization"], body))
        if self.silent:
            await asyncio.Event().wait()
        if self.statuses:
            return web.json_response({"error": {"message": "not now"}}, status=self.statuses.pop(0))
        return chat_answer(body, {"content": "cat"})


@pytest.fixture
async def chat() -> AsyncIterator[ChatServer]:
    server, app = ChatServer(), web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    async with serving_http(app) as server.url:
        yield server


def evaluated(url: str, **client: Any) -> dict[str, Any]:
    return {
        "client": {"api": "chat_completions", "base_url": [url], **client},
        "renderer": {"name": "no such renderer"},
    }


async def test_an_evaluation_samples_from_our_own_inference_program_by_its_chat_route(
    start_mesh, make_group, inference
):
    mesh = await start_mesh([], **evaluated(inference))
    sampling = Sampling(max_tokens=5, temperature=1.0, seed=3)
    request = make_group(group_size=3, scores_only=True, sampling=sampling, deadline_s=120.0)
    rollouts = await mesh.played(request)
    assert [rollout.samples for rollout in rollouts] == [(), (), ()]
    assert {rollout.num_turns for rollout in rollouts} == {1}
    assert all(rollout.reward in (0.25, 2.25) and 0 < len(rollout.completion) <= 20 for rollout in rollouts)
    assert len({rollout.completion for rollout in rollouts}) > 1  # each of the group draws with a seed of its own
    [engine] = (await mesh.client.get_status()).engines
    assert (engine.url, engine.healthy, engine.in_flight) == (f"{inference}/v1", True, 0)


async def test_the_server_gets_key_model_messages_and_sampling(start_mesh, make_group, chat, monkeypatch):
    monkeypatch.setenv("MESH_CHAT_KEY", "sesame")
    mesh = await start_mesh([], **evaluated(chat.url, api_key_var="MESH_CHAT_KEY"))
    sampling = Sampling(max_tokens=7, temperature=0.5, top_p=0.9)
    [rollout] = await mesh.played(make_group(scores_only=True, sampling=sampling))
    assert (rollout.reward, rollout.completion) == (2.25, "cat")
    [(key, body)] = chat.requests
    assert key == "Bearer sesame"
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
    assert body == {"model": "policy", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9}


async def test_a_service_without_the_key_of_its_server_does_not_start(start_mesh, chat, monkeypatch):
    chat.key = "sesame"
    monkeypatch.setenv("MESH_CHAT_KEY", "another")
    with pytest.raises(ConfigError, match="/v1 answers 401 to calls with the key of this program; put"):
        await start_mesh([], **evaluated(chat.url, api_key_var="MESH_CHAT_KEY"))
    monkeypatch.setenv("MESH_CHAT_KEY", "sesame")
    await start_mesh([], **evaluated(chat.url, api_key_var="MESH_CHAT_KEY"))


async def test_a_call_is_made_again_where_the_server_says_not_now_and_fails_where_it_says_no(
    start_mesh, make_group, chat
):
    chat.statuses = [429, 503]
    mesh = await start_mesh([], **evaluated(chat.url, failover_s=60.0))
    [rollout] = await mesh.played(make_group(scores_only=True, deadline_s=120.0))
    assert rollout.reward == 2.25
    assert len(chat.requests) == 3
    chat.statuses = [401]
    failure, _ = await mesh.collect(make_group(scores_only=True))
    assert "401" in failure.message
    assert len(chat.requests) == 4


async def test_a_server_that_does_not_answer_in_time_is_said_to_have_timed_out(start_mesh, make_group, chat):
    chat.silent = True
    mesh = await start_mesh([], **evaluated(chat.url, failover_s=0.1, call_deadline_s=0.2))
    failure, _ = await mesh.collect(make_group(scores_only=True, deadline_s=60.0))
    assert failure.reason == "ENGINE_FAILED"
    assert failure.message.startswith(f"{chat.url}/v1 failed for 0.1 s: ReadTimeout"), failure.message


async def test_training_from_such_a_server_is_refused_and_so_is_a_version(start_mesh, make_group, chat):
    mesh = await start_mesh([], **evaluated(chat.url))
    error = await mesh.refused(make_group())
    assert error.reason is Reason.INVALID_REQUEST
    assert "samples from /v1/chat/completions (rollout.client.api), which gives no token ids" in error.message
    error = await mesh.refused(make_group(scores_only=True, exact_version=3))
    assert error.reason is Reason.VERSION_NOT_AVAILABLE
    assert chat.requests == []


async def test_one_environment_may_sample_elsewhere_for_evaluations_beside_engines(
    start_mesh, make_group, engine, chat
):
    own = {"model": "other", "client": {"type": "eval", "base_url": f"{chat.url}/v1", "api_key_var": "MESH_CHAT_KEY"}}
    mesh = await start_mesh(
        [engine], env=[{"id": "mesh_echo"}, {"id": "mesh_echo", "name": "elsewhere", "args": {"agent": own}}]
    )
    [rollout] = await mesh.played(make_group(environment="elsewhere", scores_only=True))
    assert (rollout.reward, rollout.samples) == (2.25, ())
    assert chat.requests[0][1]["model"] == "other"
    assert engine.requests == []
    failure, _ = await mesh.collect(make_group(environment="elsewhere"))
    assert (failure.reason, failure.message.partition(";")[0]) == (
        "INVALID_REQUEST",
        "agent of elsewhere is to be trained, but samples from an endpoint of its own (args.agent.client), which gives"
        " no token ids",
    )


def test_a_url_without_a_path_gets_v1_and_any_other_is_taken_as_it_is():
    assert api_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000/v1"
    assert api_url("https://openrouter.ai/api/v1") == "https://openrouter.ai/api/v1"
    assert api_url("https://some.host/v1beta/openai/") == "https://some.host/v1beta/openai"


async def test_what_a_teacher_says_comes_back_as_the_policys_tokens(start_mesh, make_group, chat, tokenizer_dir):
    mesh = await start_mesh([], client={"api": "chat_completions", "base_url": [chat.url]}, text_samples=True)
    rollouts = await mesh.played(make_group(group_size=2))  # to be trained on
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    asked = chat.requests[0][1]["messages"]
    ids = {"tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **ids)
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "cat"}], **ids)
    for rollout in rollouts:
        [sample] = rollout.samples
        stop = whole.index(2, len(prompt))  # the end of the reply; what the template puts behind it nobody says
        assert sample.token_ids.tolist() == whole[: stop + 1]
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * (stop + 1 - len(prompt))
        assert not sample.logprobs.any()
        assert (sample.version_spans, sample.temperature) == ((), 1.0)
        assert [(span.role, span.text) for span in sample.message_spans][-1] == ("assistant", "cat")
