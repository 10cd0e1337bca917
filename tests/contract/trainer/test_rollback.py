"""`meshrl weights rollback` beside a trainer that runs: it ends, and its checkpoint is there to go on from."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path

from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig
from meshrl.wire.program_state import ProgramState
from meshrl.wire.types import StepState
from served_trainer import batch, serving
from training_loop import build


async def test_a_rollback_ends_the_run_and_keeps_the_step(tmp_path: Path) -> None:
    async with serving(tmp_path) as mesh:
        port = mesh.address.rpartition(":")[2]
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/trainer.toml").write_text(f'[server]\nhost = "127.0.0.1"\nport = {port}\n')
        (tmp_path / "configs/rl.toml").touch()
        (tmp_path / "state").mkdir()
        state = ProgramState(program="trainer", host="another machine", pid=1, at_s=time.time())
        (tmp_path / "state/trainer.json").write_text(state.to_json())

        async def meshrl(*arguments: str) -> tuple[int | None, str]:
            command = [sys.executable, "-m", "meshrl.cli.main", *arguments, "-o", str(tmp_path)]
            process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
            async with asyncio.timeout(60.0):
                said, _ = await process.communicate()
            return process.returncode, said.decode()

        await mesh.client.submit_batch(batch(1))
        await mesh.until(StepState.DONE, 1)
        assert (await meshrl("trainer", "checkpoint"))[0] == 0
        assert (await meshrl("weights", "rollback", "1"))[0] == 1  # nobody answered whether the run may end
        assert not mesh.drained.is_set()
        await mesh.client.submit_batch(batch(2))
        code, said = await meshrl("weights", "rollback", "1", "--yes")
        assert code == 0, said
        assert said.endswith(f"go on from step 1 with: rl @ {tmp_path}/configs/rl.toml --ckpt.resume-step 1\n")
        assert mesh.drained.is_set()
        assert mesh.trained.run.step_done == 2  # what it had is trained
    trained = build()
    resumed = Checkpointer(*trained, tmp_path, tokenizer=None)
    resumed.prune(CheckpointConfig(keep_last=1))
    assert resumed.restore(1) == trained.run.step_done == 1
