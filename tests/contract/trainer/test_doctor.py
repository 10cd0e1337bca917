"""`meshrl doctor --address` asks a trainer for the steps that it keeps, where its run's folder is elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE

from meshrl.wire.types import StepState
from served_trainer import Mesh, batch


async def test_the_causes_of_a_run_elsewhere_are_read_from_its_trainer(mesh: Mesh) -> None:
    for step in range(1, 7):
        await mesh.client.submit_batch(batch(step, advantage=0.0))
        await mesh.until(StepState.DONE, step)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshrl.cli.main", "doctor", "--address", mesh.address, "--json",
        stdin=DEVNULL, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120.0):
        said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    (found,) = json.loads(said)
    assert found["what"] == "zero_gradient"
    assert "optim/grad_norm is 0 in steps 2 to 6" in found["found"]
