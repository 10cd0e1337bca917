"""A machine that only plays environments needs no torch: the program runs where it cannot be imported."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from local_ports import free_port
from meshrl.client import RolloutClient
from meshrl.core.program import READY_FILE

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # every import of it fails
from meshrl.rollout.main import main
assert "transformers" not in sys.modules, "it is for the tokenizer alone, which is not loaded yet"
main()
"""
START_DEADLINE_S = 90.0


async def test_the_rollout_program_plays_an_environment_without_torch(tmp_path, tokenizer_dir, engine, make_group):
    ready, port = tmp_path / "ready", free_port()
    config = tmp_path / "rollout.toml"
    config.write_text(
        f"""
        tokenizer = "{tokenizer_dir}"
        output_dir = "{tmp_path}/out"
        workers = 0
        [server]
        port = {port}
        [client]
        base_url = ["{engine.url}"]
        [renderer]
        name = "default"
        [[env]]
        id = "reverse_text"
        """
    )
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITHOUT_TORCH, "@", str(config), env={**os.environ, READY_FILE: str(ready)}
    )
    try:
        await until_there(ready, program)
        async with RolloutClient(f"127.0.0.1:{port}") as client:
            events = [event async for event in client.run_rollouts(make_group(environment="reverse_text"))]
        assert events[-1].finished == 1
        assert 0.0 <= events[0].reward <= 1.0
    finally:
        program.terminate()
        assert await asyncio.wait_for(program.wait(), 60) == 0


async def until_there(ready: Path, program: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_DEADLINE_S):
        while not await asyncio.to_thread(ready.exists):
            if program.returncode is not None:
                pytest.fail(f"the program ended with {program.returncode}")
            await asyncio.sleep(0.1)
