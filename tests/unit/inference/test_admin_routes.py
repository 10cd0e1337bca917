"""Loading adapters, joining groups and putting an engine to sleep by hand, and who may."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from group_senders import GroupSenders
from inference_kit import EngineFactory, Start, full_forward, make_model, post
from meshrl.inference.embedded.staging import LiveWeights
from meshrl.inference.http.admin_routes import ADMIN_PATHS
from meshrl.inference.sleep import Sleeper
from meshrl.models.lora import adapted_layers, adapter_config, adapter_state, save_adapter
from meshrl.models.state import hf_state
from meshrl.versions.peft import CONFIG_FILE
from trained import apply_lora

Senders = Callable[..., GroupSenders]


@pytest.fixture
def adapter(model: PreTrainedModel, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """An adapter as the trainer saves it, and the model that it makes."""
    trained = copy.deepcopy(model)
    apply_lora(trained, rank=2, alpha=3.0, dropout=0.0, target_modules=["q_proj"])
    with torch.no_grad():
        for layer in adapted_layers(trained).values():
            layer.lora_A.normal_()
            layer.lora_B.normal_()
    save_adapter(tmp_path / "adapter", adapter_state(trained), adapter_config(trained, "tiny"))
    merged = copy.deepcopy(model)
    merged.load_state_dict(hf_state(trained), strict=False)
    return tmp_path / "adapter", merged


async def test_adapter_folder_becomes_the_next_version_of_its_name(
    serve: Start, start_engine: EngineFactory, adapter: tuple[Path, PreTrainedModel]
) -> None:
    folder, merged = adapter
    engine = await start_engine()
    client = await serve(engine)
    before = await engine.weights_root()
    status, answer = await post(client, "/load_lora_adapter", {"lora_name": "mine", "lora_path": str(folder)})
    assert (status, answer["version"], answer["lora_name"], answer["pause_s"]) == (200, 1, "mine", 0.0)
    body = {"model": "mine", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 6, "logprobs": 0}}
    status, answer = await post(client, "/inference/v1/generate", body)
    choice = answer["choices"][0]
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    forward = full_forward(merged, [1, 2, 3], choice["token_ids"])
    np.testing.assert_allclose(found, forward, atol=1e-4)
    assert await engine.weights_root() == before
    answer = await post(client, "/load_lora_adapter", {"lora_name": "mine", "lora_path": str(folder), "version": 7})
    assert answer[0] == 200
    async with client.get("/version") as response:
        told = await response.json()
    assert (told["version"], told["runs"]) == (7, {"mine": 7})


async def test_a_run_that_is_not_there_yet_is_503_with_retry_after(serve: Start, start_engine: EngineFactory) -> None:
    client = await serve(await start_engine())
    body = {"model": "b@", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["reason"] == "VERSION_NOT_AVAILABLE"


async def test_folders_that_are_no_plain_adapter_of_the_model_are_refused(
    serve: Start, start_engine: EngineFactory, adapter: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder, _ = adapter
    engine = await start_engine()
    client = await serve(engine)
    status, answer = await post(client, "/load_lora_adapter", {"lora_path": str(tmp_path)})
    assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST")
    config = json.loads((folder / CONFIG_FILE).read_text())
    for other in ({"use_dora": True}, {"alora_invocation_tokens": [1]}, {"init_lora_weights": "pissa_niter_4"}):
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **other}))
        status, answer = await post(client, "/load_lora_adapter", {"lora_path": str(folder)})
        assert (status, answer["error"]["reason"]) == (400, "NOT_SUPPORTED")
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "r": 8}))
    status, answer = await post(client, "/load_lora_adapter", {"lora_path": str(folder)})
    assert (status, answer["error"]["reason"]) == (400, "LAYOUT_MISMATCH")
    assert engine.version == 0


async def test_group_is_joined_by_hand(serve: Start, start_engine: EngineFactory, new_senders: Senders) -> None:
    engine, senders = await start_engine(), new_senders()
    client = await serve(engine)
    host, port = senders.address.split(":")
    body = {"host": host, "port": int(port), "generation": 2, "num_receivers": 1, "deadline_s": 5.0}
    (status, answer), _ = await asyncio.gather(post(client, "/init_broadcaster", body), senders.meet(2))
    assert (status, answer) == (200, {"status": "ok", "generation": 2, "ranks": 1})
    other = make_model(seed=5)
    parcel = senders.parcel(1, hf_state(other))
    await asyncio.gather(engine.receive(parcel.manifest), senders.send(parcel))
    await engine.pause()
    await engine.apply(1, parcel.manifest.result_root)
    assert await engine.weights_root() == LiveWeights(other).root()
    status, answer = await post(client, "/init_broadcaster", {**body, "first_receiver": 1})
    assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize("remote", ["127.0.0.1", "10.1.2.3"])
async def test_the_key_opens_admin_routes_and_from_elsewhere_nothing_else_does(
    serve: Start, start_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, remote: str
) -> None:
    monkeypatch.setattr("aiohttp.web.BaseRequest.remote", remote)
    engine, key = await start_engine(), {"Authorization": "Bearer secret"}
    with_key, without = await serve(engine, api_key="secret"), await serve(engine)
    assert (await without.get("/health")).status == 200
    for path in sorted(ADMIN_PATHS - {"/is_sleeping"}):
        assert (await post(with_key, path, {}))[0] == 401, path
        if remote == "10.1.2.3":
            assert (await post(without, path, {}, headers=key))[0] == 403, path
    assert not engine.paused
    assert (await post(with_key, "/pause", {}, headers=key))[0] == 200
    assert engine.paused


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 403),  # its name was made to point here
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "user@127.0.0.1.evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "10.0.0.1"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
    ],
    ids=str,
)
async def test_a_web_page_cannot_reach_admin_routes(
    serve: Start, start_engine: EngineFactory, headers: dict[str, str], status: int
) -> None:
    engine = await start_engine()
    client = await serve(engine)
    for path in ("/pause", "/%70ause"):
        headers = {"Content-Type": "application/json", **headers}
        async with client.post(path, data=b"{}", headers=headers) as response:
            assert response.status == status, await response.text()
            if status != 200:
                assert "send" in await response.text() or "call it" in await response.text()
    assert engine.paused is (status == 200)


async def test_page_elsewhere_is_refused_with_the_key_too(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine, api_key="secret")
    headers = {"Authorization": "Bearer secret", "Origin": "http://evil.example"}
    assert (await post(client, "/pause", {}, headers=headers))[0] == 403
    async with client.get("/is_sleeping", headers={**headers, "Origin": "http://evil.example"}) as response:
        assert response.status == 403
    assert not engine.paused


async def test_admin_routes_without_a_body_need_no_content_type(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    async with client.post("/pause", skip_auto_headers=["Content-Type"]) as response:
        assert response.status == 200
    assert engine.paused


async def test_engine_is_put_to_sleep_and_woken_by_hand(serve: Start, start_engine: EngineFactory) -> None:
    """The embedded engine has no sleep mode, so its answers to the three verbs are the only thing that is made up."""
    engine = await start_engine()
    busy = False

    async def nothing() -> None:
        return None

    class Sleepy:
        sleeper = Sleeper(nothing, nothing, busy=lambda: busy, deadline_s=5.0)
        can_sleep = True
        sleeping = property(lambda self: self.sleeper.sleeping)
        sleep, wake = sleeper.sleep, sleeper.wake

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    client = await serve(Sleepy())  # type: ignore[arg-type] # the rest is the engine's

    async def is_sleeping() -> Any:
        async with client.get("/is_sleeping") as response:
            return (await response.json())["is_sleeping"]

    assert await post(client, "/sleep", {}) == (200, {"is_sleeping": True, "in_flight": 0})
    assert await is_sleeping()
    assert await post(client, "/wake_up", {}) == (200, {"is_sleeping": False})
    assert not await is_sleeping()
    busy = True
    assert await post(client, "/sleep", {}) == (200, {"is_sleeping": False, "in_flight": 0})
