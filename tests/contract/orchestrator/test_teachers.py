"""Distillation in a run over real gRPC: a real engine behind HTTP scores what the scripted policy sampled."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import PreTrainedModel

from grpc_servers import served
from meshrl.client import WeightSyncClient
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.http.app import InferenceServer
from meshrl.orchestrator.config import OrchestratorConfig, TeacherConfig, TrainEnvConfig, TrainEnvsConfig
from meshrl.orchestrator.teachers.logprob_servers import LogprobServers
from meshrl.orchestrator.teachers.scorer import build_scorer
from meshrl.orchestrator.work.recipes import build_recipes
from meshrl.sampling.retry import RunError
from meshrl.v1 import rollout_pb2_grpc
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutRequest
from scripted_services import RolloutServicer, Script, samples_of
from tiny_qwen3 import tiny_qwen3

TOKENS = list(range(5))  # of every scripted rollout, the last three sampled


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_qwen3(vocab_size=100, initializer_range=0.5, tie_word_embeddings=False).eval()


@pytest.fixture
async def teacher(model: PreTrainedModel) -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of an engine, and the paths that it was asked for."""
    asked: list[str] = []

    @web.middleware
    async def note(request: web.Request, handler):
        asked.append(request.path)
        return await handler(request)

    engine = EmbeddedEngine(model, max_model_len=16, num_slots=4, seed=0)
    engine.start()
    app = InferenceServer(engine, model_name="t", codec=None).app()
    app.middlewares.append(note)
    async with TestServer(app) as server:
        yield str(server.make_url("")), asked
    await engine.close()


def expected_logprobs(model: PreTrainedModel) -> tuple[list[float], torch.return_types.topk]:
    """Of the sampled tokens, and of the three likeliest in the place of each."""
    with torch.inference_mode():
        logprobs_TV = model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [float(logprobs_TV[at - 1, TOKENS[at]]) for at in (2, 3, 4)], logprobs_TV[1:4].topk(3)


async def test_a_teacher_and_rewards_train_environments_of_one_run(
    mesh, script, batches, make_config, start, model, teacher
) -> None:
    url, asked = teacher
    script.environments = {"plain": 50, "taught": 50}
    taught = {"type": "opd", "weight": 2.0, "top_k": 3}
    train = TrainEnvsConfig(
        env=[TrainEnvConfig(id="plain"), TrainEnvConfig.model_validate({"id": "taught", "algo": taught})]
    )
    script.reward = lambda request, place: float(place % 2) if request.environment == "plain" else 1.0
    config = make_config(
        mesh.services,
        train=train,
        batch_size=16,
        max_steps=2,
        max_async_level=0,
        teacher=TeacherConfig.model_validate({"client": {"base_url": url}}),
    )
    async with start(config) as (loop, journal):
        await loop.train()
    assert journal.ledger.balance().trained == 32
    seen = dict.fromkeys(script.environments, 0)
    said, likeliest = expected_logprobs(model)
    for name, sample in samples_of(batches):
        seen[name] += 1
        if name == "plain":
            assert sample["loss_mask"] == [False, False, True, True, True]
            assert not any(sample["ref_kl_weights"] or ())
        else:  # equal rewards, which rl would have dropped
            assert not any(sample["loss_mask"])
            assert sample["ref_kl_weights"] == [0, 0, 2, 2, 2]
            assert sample["ref_logprobs"][2:] == pytest.approx(said, abs=1e-4)
            assert sample["ref_top_ids"][2:] == likeliest.indices.tolist()
            assert np.array(sample["ref_top_logprobs"][2:]) == pytest.approx(likeliest.values.numpy(), abs=1e-4)
        assert sample["inference_logprobs"] == [0, 0, -0.5, -0.5, -0.5]  # the ratio of either term
    assert seen == {"plain": 16, "taught": 16}
    scored = asked.count("/inference/v1/generate")
    assert 2 <= scored <= 17, "the same tokens are scored once, but for those that are asked for at the same moment"


async def test_self_distillation_asks_its_own_teacher_what_it_says_after_the_best_attempt(
    mesh, script, batches, make_config, start, model, teacher
) -> None:
    url, asked = teacher
    script.environments = {"taught": 50}
    script.reward = lambda request, place: float(place == 0)
    algo = {"type": "opsd", "context_tokens": 12, "teacher": {"client": {"base_url": url}}}
    train = TrainEnvsConfig(env=[TrainEnvConfig.model_validate({"id": "taught", "algo": algo})])
    config = make_config(mesh.services, train=train, batch_size=16, max_steps=1, max_async_level=0)
    async with start(config) as (loop, _):
        await loop.train()
    with torch.inference_mode():
        logprobs_TV = model(input_ids=torch.tensor([TOKENS + TOKENS])).logits[0].log_softmax(-1)
    said = [float(logprobs_TV[len(TOKENS) + at - 1, TOKENS[at]]) for at in (2, 3, 4)]
    taught = [sample for _, sample in samples_of(batches)]
    assert taught
    for sample in taught:
        assert sample["ref_kl_weights"] == [0, 0, 1, 1, 1]
        assert sample["ref_logprobs"][2:] == pytest.approx(said, abs=1e-4)
    assert "/inference/v1/generate" in asked


async def test_a_teacher_plays_one_environment_and_the_policy_another(
    mesh, script, batches, make_config, start
) -> None:
    script.environments = {"plain": 50, "shown": 50}
    played = Script(environments={"shown": 50})

    def as_text(request: RolloutRequest, place: int, rollout: Rollout) -> Rollout:
        (sample,) = rollout.samples
        return replace(rollout, samples=(replace(sample, version_spans=(), logprobs=np.zeros(5, np.float32)),))

    played.alter = as_text
    played.engine_version = 0
    adder = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    shown = {"id": "shown", "algo": {"type": "sft", "min_reward": 1.0}}
    train = TrainEnvsConfig(env=[TrainEnvConfig(id="plain"), TrainEnvConfig.model_validate(shown)])
    values = {"batch_size": 16, "max_steps": 10, "max_async_level": 0, "max_off_policy_steps": 1}
    async with served("meshrl.v1.RolloutService", adder, RolloutServicer(played)) as address:
        teacher = TeacherConfig.model_validate({"rollout": address})
        async with start(make_config(mesh.services, train=train, teacher=teacher, **values)) as (loop, journal):
            await loop.train()
    assert {request.environment for request in script.requests} == {"plain"}
    assert {(request.environment, request.min_version) for request in played.requests} == {("shown", 0)}
    imitated = [sample for name, sample in samples_of(batches) if name == "shown"]
    assert len(imitated) == 40  # half of what the teacher played got the reward that is asked for
    assert not any(mask for sample in imitated for mask in sample["loss_mask"])
    assert all(sample["ce_weights"] == [0, 0, 1, 1, 1] for sample in imitated)
    acted = [sample["loss_mask"] for name, sample in samples_of(batches) if name == "plain"]
    assert acted == [[False, False, True, True, True]] * 80
    assert (journal.ledger.balance().trained, journal.ledger.balance().open) == (120, 0)  # and none was too old


async def test_a_rollout_of_the_policy_says_its_versions(mesh, script, make_config, start) -> None:
    def unsaid(request: RolloutRequest, place: int, rollout: Rollout) -> Rollout:
        return replace(rollout, samples=(replace(rollout.samples[0], version_spans=()),))

    script.alter = unsaid
    filters = {"max_lost_groups": 1}
    async with start(make_config(mesh.services, filters=filters)) as (loop, _):
        with pytest.raises(RunError, match=r"BAD_ROLLOUT.*must say which version of the policy"):
            await loop.train()


async def test_tokens_beyond_the_teachers_length_have_no_score(teacher, model) -> None:
    servers = LogprobServers("the teacher", _at(teacher[0]), config=TeacherConfig(), api_key=None)
    try:
        found = await servers.score(np.arange(30, dtype=np.int32), top_k=2)
    finally:
        await servers.close()
    assert np.isnan(found.logprobs[[0, *range(15, 30)]]).all()
    assert np.isfinite(found.logprobs[1:15]).all()
    assert (found.top_ids[[0, *range(15, 30)]] == -1).all()
    assert (found.top_ids[1:15] >= 0).all()


async def test_a_teacher_without_prompt_logprobs_is_an_error_that_says_what_is_needed() -> None:
    app = web.Application()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "chat"}]})

    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        servers = LogprobServers("the teacher", _at(str(server.make_url("/v1"))), config=TeacherConfig(), api_key=None)
        try:
            with pytest.raises(RunError, match=r"answered 404.*must be an engine that gives prompt logprobs"):
                await servers.check()
        finally:
            await servers.close()


async def test_a_teacher_that_is_not_there_is_waited_for_and_then_named() -> None:
    config = TeacherConfig.model_validate({"client": {"failover_s": 0.2}})
    servers = LogprobServers("the teacher", _at("http://127.0.0.1:9"), config=config, api_key=None)
    try:
        with pytest.raises(RunError, match=r"the teacher scored nothing for 0.2 s: http://127.0.0.1:9 does not answer"):
            async with asyncio.timeout(60.0):
                await servers.check()
    finally:
        await servers.close()


async def test_engines_that_the_hub_cannot_list_are_waited_for_and_then_named() -> None:
    async def urls() -> list[str]:
        raise MeshError(Reason.UNREACHABLE, "hub gone")

    config = TeacherConfig.model_validate({"client": {"failover_s": 0.2}})
    servers = LogprobServers("the policy's engines", urls, config=config, api_key=None)
    try:
        with pytest.raises(RunError, match=r"engines scored nothing for 0.2 s: UNREACHABLE: hub gone; is it running"):
            await servers.check()
    finally:
        await servers.close()


async def test_scores_without_aiohttp_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "meshrl.orchestrator.teachers.logprob_servers")
    taught = TrainEnvConfig.model_validate({"id": "taught", "algo": {"type": "opd"}})
    teacher = TeacherConfig.model_validate({"client": {"base_url": "http://127.0.0.1:9"}})
    config = OrchestratorConfig(train=TrainEnvsConfig(env=[taught]), teacher=teacher)
    async with WeightSyncClient("127.0.0.1:9") as hub:
        with pytest.raises(RunError, match=r"need aiohttp: pip install 'meshrl\[rollout\]'"):
            build_scorer(
                build_recipes(config.algos, config.advantage, seq_len=config.seq_len),
                config.teachers,
                hub,
                engine_pool="",
            )


def _at(url: str):
    async def urls() -> list[str]:
        return [url]

    return urls
