"""The trainer program as two ranks on two GPUs (NCCL): it trains, ends in order, and ends when a rank dies."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.wire.types import StepState
from ranked_trainer import batch, configure, gone, two_ranks
from trainer_kit import published, running_hub, save_tiny_model, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


async def test_two_gpus_train_and_end_in_order(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    async with (
        running_hub(tmp_path / "hub") as hub,
        two_ranks(configure(tmp_path / "two", model, hub, ranks=2, device="cuda")) as program,
    ):
        for step in (1, 2):
            await program.client.submit_batch(batch(step, ranks=2))
            await until(program.client, StepState.DONE, step)
        first, second = await published(hub, 1), await published(hub, 2)
        assert any(not np.array_equal(first[name], second[name]) for name in first)
        program.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(program.exit_code, 30) == 0, program.console.read_text()


async def test_a_killed_rank_ends_both_within_seconds(tmp_path: Path) -> None:
    """Whichever it is: two trainers at once, since most of the time is their start."""
    model = save_tiny_model(tmp_path / "model")
    async with running_hub(tmp_path / "hub") as hub, running_hub(tmp_path / "other") as other:
        await asyncio.gather(
            *(_killed(tmp_path / f"rank {victim}", model, at, victim) for victim, at in enumerate((hub, other)))
        )


async def _killed(folder: Path, model: str, hub: str, victim: int) -> None:
    async with two_ranks(configure(folder, model, hub, ranks=2, device="cuda")) as program:
        await program.client.submit_batch(batch(1, ranks=2))
        await until(program.client, StepState.DONE, 1)
        pids = program.rank_pids()
        os.kill(pids[victim], signal.SIGKILL)
        assert await asyncio.to_thread(program.exit_code, 15) != 0
        assert await gone(pids, 2)
