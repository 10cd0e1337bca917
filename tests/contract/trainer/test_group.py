"""The trainer program as two ranks (gloo, CPU), through the real client and a real hub."""

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from meshrl.wire.types import StepState
from ranked_trainer import batch, children, configure, gone, start, two_ranks
from trainer_kit import one_rank, published, running_hub, until

STEPS = 3


async def reference(folder: Path, model: str) -> tuple[dict[str, NDArray[np.float32]], dict[str, float]]:
    """The same steps on one rank: the last version and its metrics."""
    async with running_hub(folder / "hub") as hub, one_rank(configure(folder, model, hub, ranks=1)) as client:
        for step in range(1, STEPS + 1):
            await client.submit_batch(batch(step, ranks=1))
            event = await until(client, StepState.DONE, step)
        return await published(hub, STEPS), dict(event.metrics)


async def test_two_ranks_train_as_one_survive_a_bad_batch_and_drain(tmp_path: Path, model: str, hub: str) -> None:
    async with two_ranks(configure(tmp_path / "two", model, hub, ranks=2), by=["nohup"]) as program:
        client = program.client
        info = await client.get_trainer()
        assert (info.world_size, info.dp_size) == (2, 2)
        await client.submit_batch(batch(1, ranks=2, bad_rank=1))
        failed = await until(client, StepState.FAILED, 1)
        assert failed.reason == "STEP_FAILED"
        assert "not finite" in failed.message
        program.process.send_signal(signal.SIGHUP)  # which nohup ignores
        for step in range(1, STEPS + 1):
            await client.submit_batch(batch(step, ranks=2))
            event = await until(client, StepState.DONE, step, after_revision=failed.revision)
        step, folder = await client.save_checkpoint()
        assert step == STEPS
        assert [f"random_{rank:05d}.safetensors" in os.listdir(folder) for rank in (0, 1, 2)] == [True, True, False]
        assert (await client.list_runs())[0].durable_step == STEPS
        pids = program.rank_pids()
        assert len(pids) == 2
        program.process.send_signal(signal.SIGTERM)
        assert program.exit_code(60.0) == 0, program.console.read_text()
        assert await gone(pids, 60.0)
        assert "not finite" in program.rank_log(1)
        log = (program.output_dir / "logs/trainer.log").read_text()
        assert len(re.findall(r"step \d \| loss", log)) == STEPS
        assert "SIGTERM: draining" in log
        assert "SIGTERM: rank 0 gets SIGTERM, on which it drains" in log
        assert "SIGHUP" not in log
        assert "finished at version 3" in program.console.read_text()

    ours = await published(hub, STEPS)
    theirs, expected = await reference(tmp_path / "one", model)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-5, rtol=1e-5, err_msg=name)
    start = await published(hub, 0)
    assert max(np.abs(ours[name] - start[name]).max() for name in ours) > 1e-3
    for name in ("loss/mean", "optim/grad_norm", "entropy/all/mean", "entropy/b/mean", "mismatch_kl/a/max"):
        assert event.metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


async def test_versions_of_a_bfloat16_trainer_have_that_type(tmp_path: Path, model: str, hub: str) -> None:
    config = configure(tmp_path / "one", model, hub, ranks=1)
    rounded = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    async with one_rank(rounded) as client:
        await client.submit_batch(batch(1, ranks=1))
        assert (await until(client, StepState.DONE, 1)).version == 1
    start, trained = await published(hub, 0), await published(hub, 1)
    for name, tensor in Qwen3ForCausalLM.from_pretrained(model).state_dict().items():
        if name in start:
            np.testing.assert_array_equal(start[name], tensor.bfloat16().float().numpy(), err_msg=name)
    assert max(np.abs(trained[name] - start[name]).max() for name in start) > 1e-3


async def test_ranks_that_have_only_begun_end_with_their_agent(tmp_path: Path, model: str, hub: str) -> None:
    config = configure(tmp_path / "two", model, hub, ranks=2)
    config.output_dir.mkdir()
    agent = start(config, tmp_path / "console.txt")
    ranks: list[int] = []
    try:
        async with asyncio.timeout(90):
            while len(ranks) < 2:
                ranks = await asyncio.to_thread(children, agent.pid)
                await asyncio.sleep(0.05)
    finally:
        agent.kill()
        agent.wait(60.0)
    try:
        assert await gone(ranks, 60.0)
    finally:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
