"""What every HTTP route does over a real engine: errors, health, limits, the key, and what changes by hand."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

from inference_kit import VOCAB, EngineFactory, Start, make_model, post
from meshrl.inference.embedded.engine import EmbeddedEngine


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", {"token_ids": [1] * 96}, "maximum context length is 96"),
        ("/inference/v1/generate", {"token_ids": []}, "0 tokens"),
        ("/inference/v1/generate", {}, "token_ids: Field required"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "use stop_token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"image": 1}}, "text models only"),
        ("/inference/v1/generate", {"token_ids": [VOCAB]}, "token ids must be in"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 0}, "n: "),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 3.0}, "presence_penalty"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": []}, "empty list"),
    ],
)
async def test_bad_input_is_answered_with_what_to_change(path: str, body: Any, words: str, serve: Start) -> None:
    status, answer = await post(await serve(), path, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_broken_json_and_unknown_routes_are_json_errors(serve: Start) -> None:
    client = await serve()
    async with client.post("/v1/completions", data=b"{") as response:
        assert response.status == 400
        assert "Invalid JSON" in (await response.json())["error"]["message"]
    async with client.get("/nothing") as response:
        assert response.status == 404
        assert "/nothing" in (await response.json())["error"]["message"]


async def test_models_health_version_and_metrics(serve: Start) -> None:
    client = await serve()
    card = (await (await client.get("/v1/models")).json())["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 96)
    assert (await client.get("/health")).status == 200
    assert await (await client.get("/version")).json() == {
        "version": 0,
        "root": "",
        "paused": False,
        "in_flight": 0,
        "logprobs_mode": "processed_logprobs",
        "slots": 8,
        "kv_tokens": 8 * 96,
    }
    scraped = await client.get("/metrics")
    assert scraped.content_type == "text/plain"
    families = {family.name: family for family in text_string_to_metric_families(await scraped.text())}
    assert families["meshrl_engine_slots"].samples[0].value == 8
    assert families["meshrl_engine_steps"].type == "counter"


async def test_health_is_503_while_draining(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    engine.begin_drain()
    async with client.get("/health") as response:
        assert response.status == 503
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["reason"]) == (503, "DRAINING")


async def in_flight(engine: EmbeddedEngine) -> None:
    """Until the engine has a request."""
    async with asyncio.timeout(60.0):
        while engine.in_flight == 0:  # noqa: ASYNC110  # a plain property of the engine
            await asyncio.sleep(0.01)
    assert engine.in_flight == 1


async def test_a_full_queue_is_429_with_retry_after(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine(num_slots=1, max_queue=0)
    client = await serve(engine)
    await engine.pause()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    running = asyncio.create_task(post(client, "/inference/v1/generate", body))
    await in_flight(engine)
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
    await engine.resume()
    assert (await running)[0] == 200


async def test_a_client_that_leaves_frees_its_slot(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    await engine.pause()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    request = asyncio.create_task(post(client, "/inference/v1/generate", body))
    await in_flight(engine)
    request.cancel()
    await asyncio.wait_for(engine.idle(), 60.0)
    await engine.resume()
    assert engine.stats().finished_requests == 0


async def test_a_request_past_its_deadline_is_504(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine, request_deadline_s=0.05)
    await engine.pause()
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["reason"]) == (504, "DEADLINE_PASSED")
    await engine.resume()


async def test_the_api_key_guards_all_but_health(serve: Start) -> None:
    client = await serve(api_key="secret")
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    headers = {"Authorization": "Bearer secret"}
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    assert (await post(client, "/inference/v1/generate", body, headers=headers))[0] == 200
    assert (await client.get("/health")).status == 200
    assert (await client.get("/v1/models")).status == 401


async def test_weights_are_updated_from_disk_and_reloaded(serve: Start, tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "base")
    make_model(seed=9).save_pretrained(tmp_path / "new")
    client = await serve(base_model=str(tmp_path / "base"))
    greedy = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
    before = (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0]
    status, updated = await post(client, "/update_weights", {"weight_dir": str(tmp_path / "new")})
    assert (status, updated["version"]) == (200, 1)
    after = (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0]
    assert after["token_ids"] != before["token_ids"]
    assert after["version_spans"] == [[0, 8, 1]]
    assert (await (await client.get("/version")).json())["root"] == updated["root"] != ""
    status, reloaded = await post(client, "/reload_weights", {})
    assert (status, reloaded["version"]) == (200, 0)
    assert (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0] == before


async def test_a_folder_without_a_fitting_checkpoint_is_refused(serve: Start, tmp_path: Path) -> None:
    client = await serve()
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path)})
    assert status == 400
    assert "no *.safetensors" in answer["error"]["message"]
    make_model(hidden_size=16).save_pretrained(tmp_path / "other")
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path / "other")})
    assert (status, answer["error"]["reason"]) == (400, "LAYOUT_MISMATCH")
    assert (await (await client.get("/version")).json())["version"] == 0


@pytest.mark.parametrize("name", ["/" + "a" * 5000, "/tmp/" + "b" * 300, "nul\0byte", "/proc/1/mem"])
async def test_a_path_that_no_folder_has_is_refused_in_a_sentence(serve: Start, name: str) -> None:
    client = await serve()
    for path, key in (("/update_weights", "path"), ("/load_lora_adapter", "lora_path")):
        status, answer = await post(client, path, {key: name, "lora_name": "a"})
        assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST"), answer
        assert len(answer["error"]["message"]) < 500


async def test_reloading_weights_whose_folder_is_gone_is_refused_in_a_sentence(
    serve: Start, tmp_path: Path, model: PreTrainedModel
) -> None:
    model.save_pretrained(tmp_path / "base")
    client = await serve(base_model=str(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    status, answer = await post(client, "/reload_weights", {})
    assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST")
    assert f"the files of base model '{tmp_path}/base' are not on this host" in answer["error"]["message"]
    assert (await (await client.get("/version")).json())["version"] == 0


async def test_pause_and_resume_over_http(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    assert (await post(client, "/pause", None))[1] == {"status": "paused", "in_flight": 0}
    assert (await (await client.get("/version")).json())["paused"] is True
    running = asyncio.create_task(post(client, "/inference/v1/generate", {"token_ids": [1]}))
    await in_flight(engine)
    assert not running.done()
    assert (await post(client, "/resume", None))[1] == {"status": "running", "in_flight": 1}
    assert (await running)[0] == 200


async def test_admin_routes_answer_this_host_only(serve: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohttp.web.BaseRequest.remote", "10.1.2.3")
    client = await serve()
    for path in ("/pause", "/resume", "/update_weights", "/reload_weights"):
        status, answer = await post(client, path, {})
        assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert (await client.get("/health")).status == 200
