"""Weights loaded by hand: from the folder of a checkpoint and back to the base model's."""

from __future__ import annotations

import signal
from pathlib import Path

from engine_mesh import EngineClient, EngineMesh
from meshrl.client import WeightSyncClient
from plain_checks import check_greedy
from plain_model import logits_of, plain_model, save_model

PROMPT = [1, 2, 3]
LONG_PROMPT = [1 + index % 63 for index in range(400)]


async def serves(mesh: EngineMesh, client: EngineClient, seed: int, version: int) -> None:
    for prompt in (PROMPT, LONG_PROMPT):
        choice = await client.greedy(prompt)
        assert choice["version_spans"] == [[0, 40, version]]
        check_greedy(mesh.kind, logits_of(plain_model(seed), prompt, choice["token_ids"]), choice)


async def test_weights_are_loaded_by_hand_until_the_hub_brings_its_next_version(
    mesh: EngineMesh, client: EngineClient, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "other", 5, mesh.kind.dtype)
    await mesh.publish(1)
    mesh.hub.process.send_signal(signal.SIGSTOP)  # else it has its version served again, once the agent looks
    try:
        answer = await client.post("/update_weights", {"weight_dir": str(folder), "version": mesh.version + 100})
        assert answer.status == 200, answer.body
        assert (answer.body["status"], answer.body["version"]) == ("ok", mesh.version + 100)
        assert 0.0 < answer.body["pause_s"] < 60.0
        await serves(mesh, client, 5, mesh.version + 100)
        answer = await client.post("/reload_weights", {"version": mesh.version + 200})
        assert answer.status == 200, answer.body
        await serves(mesh, client, mesh.base_seed, mesh.version + 200)
    finally:
        mesh.hub.process.send_signal(signal.SIGCONT)
    await mesh.publish(2)
    await serves(mesh, client, 2, mesh.version)


async def test_a_folder_that_does_not_fit_is_refused_and_the_weights_stay(
    mesh: EngineMesh, client: EngineClient, tmp_path: Path
) -> None:
    assert mesh.seed is not None
    answer = await client.post("/update_weights", {"weight_dir": str(tmp_path)})
    assert answer.status == 400
    assert "pass the folder of a checkpoint" in answer.message
    assert (await client.post("/update_weights", {})).message == (
        "send weight_dir: the folder of a Hugging Face checkpoint"
    )
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    answer = await client.post("/update_weights", {"weight_dir": str(tmp_path)})
    assert answer.status == 400
    assert "not a readable safetensors file" in answer.message
    answer = await client.post("/load_lora_adapter", {"lora_name": "one", "lora_path": str(tmp_path)})
    assert answer.status == 400
    why = {"embedded": "adapter in PEFT's format", "vllm": "set inference.enable_lora"}[mesh.kind.name]
    assert why in answer.message
    await serves(mesh, client, mesh.seed, mesh.version)


async def test_engine_without_a_sleep_mode_says_so_and_serves_on(mesh: EngineMesh, client: EngineClient) -> None:
    assert mesh.seed is not None
    answer = await client.post("/sleep")
    assert (answer.status, answer.body["error"]["reason"]) == (400, "NOT_SUPPORTED"), answer.body
    assert "this engine has no sleep mode" in answer.message
    assert (await client.get("/is_sleeping")).body == {"is_sleeping": False}
    assert (await client.post("/wake_up")).body == {"is_sleeping": False}
    async with WeightSyncClient(mesh.hub_address) as hub:
        outcome = await hub.sleep_engines(deadline_s=30.0)
    assert (outcome.asleep, outcome.awake) == (0, 1)
    await serves(mesh, client, mesh.seed, mesh.version)
