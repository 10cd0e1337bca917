import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace

from local_ports import free_port
from meshrl.core.config import ConfigError
from meshrl.core.program import READY_FILE
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.main import HEALTH_NAME, orchestrate
from polling import until
from run_output import assert_exact, query, records

TRACER = trace.get_tracer("test")


def states(folder: Path) -> dict[str, int]:
    return dict(query(folder, "SELECT state, COUNT(*) FROM rollouts GROUP BY state"))


async def test_a_whole_run_exits_zero_and_leaves_metrics_and_an_exact_ledger(
    mesh, make_config, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    config = make_config(mesh.services, max_steps=3, bench=True)
    assert await orchestrate(config, asyncio.Event(), TRACER) == 0
    assert (tmp_path / "ready").exists()
    assert states(tmp_path) == {"trained": 24}
    measured = json.loads((tmp_path / "bench" / "run.json").read_text())
    assert (measured["steps"], measured["sampled_tokens_per_s"] > 0, measured["efficiency"]) == (2, True, None)
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    wanted = {
        "reward/all/mean", "reward/echo/std", "seq_len/echo/mean", "completion_len/all/mean", "is_truncated/all/mean",
        "num_turns/all/mean", "empty_rollouts/all", "errored_rollouts/echo", "off_policy/all/mean",
        "filters/zero_signal", "time/step", "time/wait_for_ckpt", "time/wait_for_rollouts", "time/train_step",
        "time/wait_for_batch", "progress/tokens", "progress/samples", "progress/problems", "perf/rollouts_per_s",
        "perf/inference_tokens_per_s", "weights/pause_s", "weights/lag_s", "weights/commit_s", "weights/prepare_s",
        "loss/mean", "mismatch_kl/all/mean", "optim/grad_norm", "progress/epoch/echo", "batch/loss_tokens",
        "off_policy/all/max",
    }  # fmt: skip
    assert wanted <= set(lines[0])
    assert lines[0]["reward/all/mean"] == 0.5
    assert (lines[2]["progress/samples"], lines[2]["progress/problems"], lines[2]["progress/tokens"]) == (24, 6, 120)
    assert (lines[0]["batch/rollouts"], lines[0]["batch/loss_tokens"], lines[0]["batch/groups"]) == (8, 24, 2)


async def test_a_benchmark_that_names_no_service_needs_nobody_and_says_what_a_rollout_costs(tmp_path, said) -> None:
    config = OrchestratorConfig(bench=True, max_steps=2, batch_size=8, group_size=4, seq_len=64, output_dir=tmp_path)
    assert await orchestrate(config, asyncio.Event(), TRACER) == 0
    assert_exact(tmp_path, 2)
    assert states(tmp_path) == {"trained": 16}
    assert any(re.match(r"bench: this program took [\d.]+ ms of CPU for each of 16 rollouts", line) for line in said)
    assert json.loads((tmp_path / "bench" / "run.json").read_text())["steps"] == 1


async def test_totals_are_the_runs_whatever_the_trainer_calls_its_own(mesh, script, make_config, tmp_path) -> None:
    script.metrics |= {"progress/tokens": 7.0, "progress/samples": 3.0}
    assert await orchestrate(make_config(mesh.services, max_steps=3), asyncio.Event(), TRACER) == 0
    lines = records(tmp_path)
    assert [line["progress/samples"] for line in lines] == [8, 16, 24]
    assert [line["progress/tokens"] for line in lines] == [40, 80, 120]
    assert [line["trainer/progress/tokens"] for line in lines] == [7, 7, 7]
    assert_exact(tmp_path, 3)


async def test_a_stop_signal_ends_cleanly_with_exit_code_zero(mesh, script, make_config, tmp_path) -> None:
    script.step_s = 0.05
    stop = asyncio.Event()
    running = asyncio.create_task(orchestrate(make_config(mesh.services, max_steps=None), stop, TRACER))
    await until(lambda: len(script.batches) >= 3)
    stop.set()
    assert await asyncio.wait_for(running, 60.0) == 0
    assert set(states(tmp_path)) <= {"trained", "dropped", "cancelled"}
    assert states(tmp_path)["trained"] >= 8


async def test_a_step_that_is_trained_when_the_run_is_stopped_has_its_record(
    mesh, script, make_config, tmp_path
) -> None:
    script.holds[2] = asyncio.Event()  # its version is never published, so its activation is waited for
    stop = asyncio.Event()
    running = asyncio.create_task(orchestrate(make_config(mesh.services, max_steps=None), stop, TRACER))
    await until(lambda: len(script.batches) >= 3 and states(tmp_path).get("trained", 0) >= 16)  # of two steps
    stop.set()
    assert await asyncio.wait_for(running, 60.0) == 0
    assert_exact(tmp_path, 2)


async def test_services_that_never_serve_end_the_program_with_exit_code_one(
    make_config, mesh, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        services = mesh.services.model_copy(update={"trainer": address})
        config = make_config(services, deadlines={"startup_s": 0.5})
        assert await orchestrate(config, asyncio.Event(), TRACER) == 1
    assert not (tmp_path / "ready").exists()


async def test_health_is_served_where_a_server_is_configured(mesh, script, make_config) -> None:
    port = free_port()
    script.rollout_s = 0.5
    stop = asyncio.Event()
    running = asyncio.create_task(orchestrate(make_config(mesh.services, server={"port": port}), stop, TRACER))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=HEALTH_NAME), wait_for_ready=True, timeout=60.0
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    stop.set()
    assert await asyncio.wait_for(running, 60.0) == 0


async def test_a_run_without_training_environments_is_a_configuration_error(make_config, mesh) -> None:
    with pytest.raises(ConfigError, match=r"orchestrator.train.env must name at least one environment"):
        await orchestrate(make_config(mesh.services, train={"env": []}), asyncio.Event(), TRACER)


def test_an_orchestrator_on_its_own_writes_a_log_file(tmp_path: Path) -> None:
    config = tmp_path / "orchestrator.toml"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        config.write_text(
            f'output_dir = "{tmp_path / "out"}"\n[[train.env]]\nid = "echo"\n[deadlines]\nstartup_s = 0.2\n'
            f'[services]\nrollout = "{address}"\ntrainer = "{address}"\nweights = "{address}"\n'
        )
        ended = subprocess.run(
            [sys.executable, "-m", "meshrl.orchestrator.main", "@", str(config)],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    assert ended.returncode == 1
    log = (tmp_path / "out" / "logs" / "orchestrator.log").read_text()
    assert address in log
    assert "Traceback" not in log + ended.stdout + ended.stderr


async def test_a_platform_is_told_the_model_that_the_trainer_names(mesh, make_config, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    monkeypatch.delenv("RUN_ID", raising=False)
    registered = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/external-runs":
            registered.append(await request.json())
        return web.json_response({"run": {"id": "run-1"}}, status=201)

    platform = web.Application()
    platform.router.add_route("*", "/{path:.*}", answer)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "trainer.toml").write_text("[model]\nname = 'of an earlier run'\n")
    async with TestServer(platform) as server:
        shown = {"base_url": str(server.make_url("/")).rstrip("/"), "log_extras": None}
        config = make_config(mesh.services, max_steps=1, prime_monitor=shown)
        assert await orchestrate(config, asyncio.Event(), TRACER) == 0
    assert [run["base_model"] for run in registered] == ["scripted"]
