"""A caller of contract 1.0, run from its own code, works with the trainer of today."""

from __future__ import annotations

import json
from pathlib import Path

import older_release
from served_trainer import VOCAB, Mesh

OLD_CALLER = """
import asyncio, json, sys, types
from meshrl.client import TrainerClient
from meshrl.wire.types import CONTRACT_VERSION
async def main():
    async with TrainerClient(sys.argv[1]) as client:
        trainer = await client.get_trainer()
        runs = await client.list_runs()
        step = await client.drain()
    print(json.dumps([CONTRACT_VERSION, trainer.vocab_size, [run.run_id for run in runs], step]))
asyncio.run(main())
"""


async def test_a_caller_of_1_0_reads_the_trainer_of_today_and_drains_it(mesh: Mesh, tmp_path: Path) -> None:
    environment = older_release.unpacked(tmp_path)
    told = json.loads(await older_release.output_of(environment, OLD_CALLER, mesh.address))
    assert told == ["1.0", VOCAB, [mesh.queue.book.run_id], 0]
