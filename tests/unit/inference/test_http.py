"""HTTP routes over an engine in this process: draining, limits, weights by hand. The engine contract has the rest."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from inference_kit import EngineFactory, Start, make_model, post, until_in_flight
from meshrl.inference.embedded.staging import LiveWeights
from tiny_families import tiny_model


@pytest.mark.parametrize(
    ("body", "words"),
    [({}, "token_ids: Field required"), ({"token_ids": [1], "features": {"image": 1}}, "text models only")],
)
async def test_bad_input_is_answered_with_what_to_change(body: Any, words: str, serve: Start) -> None:
    status, answer = await post(await serve(), "/inference/v1/generate", body)
    assert (status, words in answer["error"]["message"]) == (400, True), answer


async def test_a_route_that_is_not_there_is_answered_with_those_that_are(serve: Start) -> None:
    code, answer = await post(await serve(), "/chat/completions", {})
    assert (code, answer["error"]["message"]) == (
        404,
        "POST /chat/completions: Not Found; this engine serves /v1/chat/completions, /v1/completions, /v1/models and"
        " /inference/v1/generate",
    )


async def test_a_full_queue_is_429_with_retry_after(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine(num_slots=1, max_queue=0)
    client = await serve(engine)
    await engine.pause()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    running = asyncio.create_task(post(client, "/inference/v1/generate", body))
    await until_in_flight(engine, 1)
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
    await engine.resume()
    assert (await running)[0] == 200


async def test_a_request_past_its_deadline_is_504(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine, request_deadline_s=0.05)
    await engine.pause()
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["reason"]) == (504, "DEADLINE_PASSED")
    await engine.resume()


async def test_a_folder_without_a_fitting_checkpoint_is_refused(serve: Start, tmp_path: Path) -> None:
    client = await serve()
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path)})
    assert status == 400
    assert "no *.safetensors" in answer["error"]["message"]
    make_model(hidden_size=16).save_pretrained(tmp_path / "other")
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path / "other")})
    assert (status, answer["error"]["reason"]) == (400, "LAYOUT_MISMATCH")
    assert (await (await client.get("/version")).json())["version"] == 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
async def test_a_folder_with_experts_one_by_one_is_served(
    serve: Start, start_engine: EngineFactory, tmp_path: Path, family: str
) -> None:
    engine, other = await start_engine(tiny_model(family, None), max_model_len=32), tiny_model(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.save_pretrained(tmp_path)
    status, _ = await post(await serve(engine), "/update_weights", {"path": str(tmp_path), "version": 3})
    assert (status, engine.version) == (200, 3)
    assert await engine.weights_root() == LiveWeights(other).root()
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    status, answer = await post(await serve(engine), "/update_weights", {"path": str(tmp_path)})
    assert (status, answer["error"]["reason"]) == (400, "LAYOUT_MISMATCH")


@pytest.mark.parametrize("name", ["/" + "a" * 5000, "/tmp/" + "b" * 300, "nul\0byte", "/proc/1/mem", "/nowhere"])
async def test_a_path_that_no_folder_has_is_refused_in_a_sentence(serve: Start, name: str) -> None:
    client = await serve()
    for path, key in (("/update_weights", "path"), ("/load_lora_adapter", "lora_path")):
        status, answer = await post(client, path, {key: name, "lora_name": "a"})
        assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST"), answer
        assert len(answer["error"]["message"]) < 500
        assert key != "path" or "is no folder of a checkpoint: " in answer["error"]["message"]


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


async def test_generate_reports_alternatives_and_marks_removed_ones(serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 3, "logprobs": 4, "top_k": 2, "ignore_eos": True}
    _, answer = await post(client, "/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})
    for entry in answer["choices"][0]["logprobs"]["content"]:
        tops = entry["top_logprobs"]
        assert len(tops) == 4
        assert [top["logprob"] for top in tops[2:]] == [-9999.0, -9999.0]
        assert entry["token"] in {top["token"] for top in tops[:2]}
