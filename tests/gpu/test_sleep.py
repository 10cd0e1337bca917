"""vLLM asleep on a GPU that a trainer shares: its memory is free, and a request or a version brings it back whole."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_mesh import API_KEY, MODEL_NAME, EngineClient, EngineKind, EngineMesh, Program, reference
from meshrl.client import WeightSyncClient
from meshrl.wire.types import SleepOutcome
from plain_checks import check_greedy
from plain_model import logits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GIB = 2**30
CACHE_BYTES = 4 * GIB
PROMPT = [1, 2, 3]
LONG_PROMPT = [1 + index % 63 for index in range(400)]  # several blocks of the prefix cache
SLEEPS = {
    "sleep_while_training": True,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_bytes": CACHE_BYTES,
}


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


# --- memory, over the admin routes of an engine without a hub ------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a model of random weights that are a good part of a GiB, and their bytes."""
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder, sum(parameter.numel() * parameter.element_size() for parameter in made.parameters())


@pytest.fixture(scope="module")
def server(model: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine with that model."""
    folder = tmp_path_factory.mktemp("engine")
    config = {
        "engine": "vllm",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "served_model_name": MODEL_NAME,
        "api_key": API_KEY,
        "output_dir": str(folder),
        **SLEEPS,
        "model": {"name": str(model[0]), "dtype": "bfloat16", "device": "cuda"},
        "server": {"port": 0},
    }
    program = Program(Path(sys.executable), "meshrl.inference.main", config, folder, "inference")
    yield program.address(r"on (http://\S+)")
    program.stop()


def session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {API_KEY}"})


async def asleep(client: EngineClient) -> bool:
    return bool((await client.get("/is_sleeping")).body["is_sleeping"])


async def sleep(client: EngineClient) -> bool:
    answer = await client.post("/sleep")
    assert answer.status == 200, answer.body
    return bool(answer.body["is_sleeping"])


def test_memory_of_weights_and_cache_is_free_while_the_engine_sleeps(model: tuple[Path, int], server: str) -> None:
    async def run() -> None:
        weight_bytes = model[1]
        assert weight_bytes > GIB // 4
        async with session(server) as opened:
            client = EngineClient(opened)
            before = await client.greedy(LONG_PROMPT)
            for _ in range(3):  # what one round leaves behind would add up
                awake_free = free_bytes()
                assert await sleep(client)
                gained = free_bytes() - awake_free
                assert gained >= 0.95 * (weight_bytes + CACHE_BYTES), f"{gained / GIB:.2f} GiB"
                assert await sleep(client)  # twice is fine
                after = await client.greedy(LONG_PROMPT)
                assert after["token_ids"] == before["token_ids"]
                assert after["version_spans"] == before["version_spans"] == [[0, 40, 0]]
                assert not await asleep(client)
                # The shadow is not there again before a version comes.
                assert free_bytes() <= awake_free + weight_bytes + GIB // 2

    asyncio.run(run())


def test_engine_with_a_request_in_flight_stays_awake_and_finishes_it(server: str) -> None:
    async def run() -> None:
        async with session(server) as opened:
            client = EngineClient(opened)
            (running,) = await client.begin(client.greedy(PROMPT, 1500))
            assert not await sleep(client)
            assert len((await running)["token_ids"]) == 1500
            assert await sleep(client)
            answer = await client.post("/wake_up")
            assert (answer.status, answer.body) == (200, {"is_sleeping": False})

    asyncio.run(run())


def test_requests_that_come_together_all_wait_for_the_one_waking(server: str) -> None:
    async def run() -> None:
        async with session(server) as opened:
            client = EngineClient(opened)
            expected = await client.greedy(PROMPT)
            assert await sleep(client)
            answers = await asyncio.gather(*(client.greedy(PROMPT) for _ in range(8)))
            assert [answer["version_spans"] for answer in answers] == [[[0, 40, 0]]] * 8
            assert not await asleep(client)
            assert (await client.greedy(PROMPT))["token_ids"] == expected["token_ids"]  # alone, as the first one was

    asyncio.run(run())


# --- versions, through a hub ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMesh]:
    """A hub and an engine with the plain model, which the shared checks know."""
    pytest.importorskip("vllm")
    kind = EngineKind(
        name="vllm",
        python=Path(sys.executable),
        dtype=torch.bfloat16,
        device="cuda",
        clear_margin=0.1,
        logprob_atol=0.15,
        logprob_mean=0.035,
        config=SLEEPS,
    )
    made = EngineMesh(kind, tmp_path_factory.mktemp("mesh"))
    yield made
    made.close()


async def ask_hub(mesh: EngineMesh, deadline_s: float = 60.0) -> SleepOutcome:
    async with WeightSyncClient(mesh.hub_address) as hub:
        return await hub.sleep_engines(deadline_s=deadline_s)


async def check(mesh: EngineMesh, client: EngineClient) -> dict[str, Any]:
    """The engine serves the newest version: tokens, and spans without a boundary where none is."""
    choice = await client.greedy(LONG_PROMPT)
    assert choice["version_spans"] == [[0, 40, mesh.version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), LONG_PROMPT, choice["token_ids"]), choice)
    return choice


def test_version_that_is_published_while_the_engine_sleeps_is_served(mesh: EngineMesh) -> None:
    async def run() -> None:
        await mesh.publish(0)
        async with mesh.session() as opened:
            client = EngineClient(opened)
            await check(mesh, client)
            for seed in (1, 0, 2):
                awake_free = free_bytes()
                outcome = await ask_hub(mesh)
                assert (outcome.asleep, outcome.awake) == (1, 0)
                assert free_bytes() - awake_free >= 0.95 * CACHE_BYTES
                async with WeightSyncClient(mesh.hub_address) as hub:
                    (engine,) = await hub.list_engines()
                assert (engine.sleeping, engine.routable) == (True, True)
                activation = await mesh.publish(seed)
                assert [report.applied.version for report in activation.engines] == [mesh.version]
                assert not await asleep(client)
                await check(mesh, client)

    asyncio.run(run())


def test_spans_are_exact_after_sleeping(mesh: EngineMesh) -> None:
    """Sleep counts as a pause of vLLM's scheduler: the boundary of a later version must still be the right one."""

    async def run() -> None:
        await mesh.publish(0)
        async with mesh.session() as opened:
            client = EngineClient(opened)
            for _ in range(2):
                assert (await ask_hub(mesh)).asleep == 1
                await check(mesh, client)
            old = mesh.version
            (running,) = await client.begin(client.greedy(PROMPT, 1500))
            assert (await ask_hub(mesh)).awake == 1
            await mesh.publish(1)
            (start, boundary, first), (again, end, second) = (await running)["version_spans"]
            assert (start, again, end, first, second) == (0, boundary, 1500, old, mesh.version)

    asyncio.run(run())


def test_sleeping_and_waking_take_seconds(mesh: EngineMesh) -> None:
    async def run() -> None:
        await mesh.publish(0)
        async with mesh.session() as opened:
            client = EngineClient(opened)
            outcome = await ask_hub(mesh)
            assert outcome.asleep == 1
            assert outcome.seconds < 30.0
            began_s = time.monotonic()
            await client.greedy(PROMPT, 1)
            assert time.monotonic() - began_s < 30.0

    asyncio.run(run())
