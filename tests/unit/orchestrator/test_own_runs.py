"""The run of an orchestrator: found at the trainer, or made there as its section `run` has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from meshrl.cli.run_folder import RunFolder
from meshrl.client import TrainerClient
from meshrl.core.config import ConfigError
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.main import in_mesh
from meshrl.orchestrator.peers import connect
from meshrl.orchestrator.peers.connect import the_run
from meshrl.sampling.retry import RunError
from meshrl.v1 import runs_pb2, trainer_pb2
from meshrl.wire.types import RunInfo, TrainerInfo
from run_table import serving_runs


def config_of(**more: Any) -> OrchestratorConfig:
    return OrchestratorConfig.model_validate({"train": {"env": [{"id": "echo", "name": "echo"}]}, **more})


async def test_a_run_that_the_trainer_lacks_is_made_and_one_that_it_has_is_taken() -> None:
    config = config_of(run_id="a", run={"lora": {"rank": 4, "target_modules": ["q_proj"]}, "lr": 1e-3, "share": 2.0})
    with serving_runs() as (address, table):
        async with TrainerClient(address) as client:
            trainer = info_of(await client.list_runs())
            made = await the_run(config.run_id, config.run, trainer, client)
            assert made.run_id == "a"
            spec = table.runs["a"].spec
            assert (spec.adapter.rank, spec.adapter.alpha, spec.share) == (4, 8.0, 2.0)
            assert (spec.optimizer.type, spec.optimizer.learning_rate) == ("adamw", 1e-3)
            table.runs["a"].step = 9
            again = await the_run(config.run_id, config.run, info_of(await client.list_runs()), client)
            assert again.step == 9
            with pytest.raises(RunError, match="'b' is not a run of the trainer; it has main, a"):
                await the_run("b", None, info_of(await client.list_runs()), client)


def test_a_new_run_needs_a_name() -> None:
    with pytest.raises(ValueError, match="run_id is empty; name the run there"):
        config_of(run={"lr": 1e-3})


def info_of(runs: tuple[RunInfo, ...]) -> TrainerInfo:
    return TrainerInfo(
        world_size=1, dp_size=1, seq_len=8, pad_multiple=1, objective="grpo", model="m", runs=runs, max_queued_batches=2
    )


def test_what_is_left_out_comes_from_the_mesh_that_is_joined(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    for name, port in (("trainer", 7001), ("weights", 7002), ("rollout", 7003)):
        (tmp_path / "configs" / f"{name}.toml").write_text(f'[server]\nhost = "127.0.0.1"\nport = {port}\n')
    (tmp_path / "credentials").mkdir()
    token = tmp_path / "credentials" / "orchestrator.token"
    token.write_text("id.secret\n")
    joined = in_mesh({"run_id": "a", "services": {"weights": "h:9"}}, RunFolder(tmp_path))
    assert (joined.services.trainer, joined.services.weights) == ("127.0.0.1:7001", "h:9")
    assert joined.services.rollout == ["127.0.0.1:7003"]
    assert (joined.output_dir, joined.tls.token) == (tmp_path / "run_a", token)
    with pytest.raises(ConfigError, match="names no address of `rollout`; name a run's folder"):
        in_mesh({"run_id": "a"}, RunFolder(tmp_path / "elsewhere"))


async def test_a_run_waits_for_the_trainer_to_take_up_its_folder_and_names_why_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "PLACE_POLL_S", 0.05)
    control = tmp_path / "run_a" / "control"
    control.mkdir(parents=True)
    (control / "orch.toml").touch()
    config = config_of(output_dir=control.parent, run={"lora": {"rank": 4}})  # its name is the folder's
    assert config.is_found
    with serving_runs() as (address, table):
        async with TrainerClient(address) as client:
            trainer = info_of(await client.list_runs())
            waiting = asyncio.create_task(the_run("run_a", None, trainer, client, control=control, place_s=60.0))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            table.runs["run_a"] = trainer_pb2.Run(run_id="run_a", step=4, phase=runs_pb2.RUN_PHASE_ACTIVE)
            assert (await waiting).step == 4
            with pytest.raises(RunError, match=r"no place for the run 'run_b' in deadlines.place_s \(0 s\)"):
                await the_run("run_b", None, trainer, client, control=control)
            (control / "config_validation_error.txt").write_text("optim.lr: must be above 0\n")
            with pytest.raises(RunError, match=r"has not taken up .*orch\.toml: optim\.lr: must be above 0"):
                await the_run("run_b", None, trainer, client, control=control, place_s=60.0)
