"""Services and callers of contract 1.0, run from their own code, work with those of today."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

import local_ports
import older_release
from meshrl.client import RolloutClient
from meshrl.wire.types import CONTRACT_VERSION, Rollout, RolloutSummary

OLD_CALLER = """
import asyncio, json, sys, uuid
from meshrl.client import RolloutClient
from meshrl.wire import types
async def main():
    async with RolloutClient(sys.argv[1]) as client:
        infos = await client.list_environments()
        request = types.RolloutRequest(request_id=str(uuid.uuid4()), group_id="old", environment=infos[0].name,
                                       task_index=0, group_size=2, deadline_s=30.0)
        events = [event async for event in client.run_rollouts(request)]
        status = await client.get_status()
    print(json.dumps([types.CONTRACT_VERSION, [type(event).__name__ for event in events],
                      [event.reward for event in events[:2]], status.finished]))
asyncio.run(main())
"""


CONFIG = """
seq_len = 512
workers = 0
output_dir = "{output}"
tokenizer = "{tokenizer}"
env = [{{id = "mesh_echo"}}]
renderer = {{name = "default"}}
client = {{base_url = ["{engine}"]}}
model = {{name = "policy"}}
sampling = {{max_tokens = 16}}
server = {{port = {port}}}
"""


async def test_a_caller_of_1_0_plays_a_group_at_the_service_of_today(start_mesh, engine, tmp_path: Path) -> None:
    environment = older_release.unpacked(tmp_path)
    mesh = await start_mesh([engine])
    told = json.loads(await older_release.output_of(environment, OLD_CALLER, mesh.client.address))
    assert told == ["1.0", ["Rollout", "Rollout", "RolloutSummary"], [2.25, 2.25], 2]


async def test_the_caller_of_today_plays_a_group_at_a_service_of_1_0(
    engine, make_group, tokenizer_dir: Path, tmp_path: Path
) -> None:
    code, output = tmp_path / "code", tmp_path / "output"
    code.mkdir()
    environment = older_release.unpacked(code)
    environment["PYTHONPATH"] += f":{Path(__file__).parent / 'tasksets'}"
    address = f"127.0.0.1:{local_ports.free_port()}"
    config = tmp_path / "rollout.toml"
    config.write_text(
        CONFIG.format(tokenizer=tokenizer_dir, output=output, engine=engine.url, port=address.rpartition(":")[2])
    )
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshrl.rollout.main", "@", str(config), env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with RolloutClient(address) as client:
            await client.wait_until_serving(100.0)
            await client.list_environments()
            assert (client.contract_version, client.capabilities) == ("1.0", frozenset())
            assert CONTRACT_VERSION != "1.0"
            request = make_group(group_size=2, deadline_s=60.0, linger_s=10.0, run_id="main")
            events = [event async for event in client.run_rollouts(request)]
    finally:
        with suppress(ProcessLookupError):
            service.terminate()
        _, said = await asyncio.wait_for(service.communicate(), 60)
    assert [type(event) for event in events] == [Rollout, Rollout, RolloutSummary], said.decode()
    assert [event.reward for event in events[:2]] == [2.25, 2.25]
