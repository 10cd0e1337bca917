"""The program from its configuration to its exit: health, drain, and errors that say what to change."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import NoOpTracer

from local_ports import free_port
from meshrl.core.config import ConfigError, load_config
from meshrl.core.program import READY_FILE
from meshrl.rollout import main as program
from meshrl.rollout.config import RolloutConfig

START_S = 120.0


def write_config(folder: Path, tokenizer: Path, url: str, env: str = "mesh_echo") -> Path:
    path = folder / "rollout.toml"
    path.write_text(
        f'''
        tokenizer = "{tokenizer}"
        output_dir = "{folder}/out"
        seq_len = 256
        workers = 0
        [client]
        base_url = ["{url}/v1/"]
        [renderer]
        name = "default"
        [[env]]
        id = "{env}"
        args = {{ words = ["cat"] }}
        '''
    )
    return path


async def up(ready: Path, running: asyncio.Task) -> None:
    """Waits until the program has made its file; imports alone may take a busy machine most of a minute."""
    async with asyncio.timeout(START_S):
        while not await asyncio.to_thread(ready.exists):
            if running.done():
                await running
            await asyncio.sleep(0.02)


async def test_health_follows_the_life_of_the_program(tmp_path, tokenizer_dir, engine, make_group, monkeypatch):
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    port = free_port()
    path = write_config(tmp_path, tokenizer_dir, engine.url)
    config = load_config(
        RolloutConfig, ["@", str(path), "--server.port", str(port), "--max-concurrent", "4"], prog="rollout"
    )
    assert config.max_concurrent == 4
    stop = asyncio.Event()
    running = asyncio.create_task(program.serve(config, stop, NoOpTracer()))
    await up(tmp_path / "ready", running)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=program.SERVICE))
        status = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == status.SERVING
        hold = engine.hold()  # until the state that a drain has is seen, however late that is
        async with program_client(port) as client:
            events = asyncio.create_task(_collect(client, make_group()))
            await engine.arrived.get()
            stop.set()
            assert (await watch.read()).status == status.NOT_SERVING
            hold.set()
            assert (await events)[-1].finished == 1
    assert await asyncio.wait_for(running, 60.0) == 0


async def test_workers_start_where_no_output_folder_is_named(tmp_path, tokenizer_dir, engine, monkeypatch):
    monkeypatch.chdir(tmp_path)  # outputs/ by default
    config = RolloutConfig(
        env=[{"id": "mesh_echo", "args": {"words": ["cat"]}}],
        client={"base_url": [engine.url]},
        tokenizer=str(tokenizer_dir),
        renderer={"name": "default"},
        workers=1,
    )
    async with AsyncExitStack() as stack:
        runner = await program.build(config, stack, NoOpTracer())
        assert list(runner.environments) == ["mesh_echo"]
    assert list(tmp_path.glob("outputs/logs/envs/*/*/env_worker_1.log"))


def program_client(port: int):
    from meshrl.client import RolloutClient

    return RolloutClient(f"127.0.0.1:{port}")


async def _collect(client, request):
    return [event async for event in client.run_rollouts(request)]


async def test_an_unknown_taskset_ends_the_program_with_its_name(tmp_path, tokenizer_dir, engine):
    path = write_config(tmp_path, tokenizer_dir, engine.url, env="no_such_taskset")
    config = load_config(RolloutConfig, ["@", str(path), "--server.port", "0"], prog="rollout")
    with pytest.raises(ConfigError, match="no_such_taskset"):
        await program.serve(config, asyncio.Event(), NoOpTracer())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env": []}, "at least one environment"),
        ({"env": [{"id": "a"}, {"id": "b", "name": "a"}]}, "distinct names, got a"),
        (
            {"env": [{"id": "a"}], "client": {"base_url": ["localhost:8000"]}},
            "http://127.0.0.1:8000, got 'localhost:8000'",
        ),
        ({"env": [{"id": "a"}], "client": {"base_url": []}}, "needs engines"),
    ],
)
def test_a_configuration_that_cannot_work_says_what_to_change(options, words):
    with pytest.raises(ValueError, match=words):
        RolloutConfig(**options)
