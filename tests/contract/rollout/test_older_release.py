"""A caller of contract 1.0, run from its own code, works with the service of today; tests/mesh has the reverse."""

from __future__ import annotations

import json
from pathlib import Path

import older_release

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


async def test_a_caller_of_1_0_plays_a_group_at_the_service_of_today(start_mesh, engine, tmp_path: Path) -> None:
    environment = older_release.unpacked(tmp_path)
    mesh = await start_mesh([engine])
    told = json.loads(await older_release.output_of(environment, OLD_CALLER, mesh.client.address))
    assert told == ["1.0", ["Rollout", "Rollout", "RolloutSummary"], [2.25, 2.25], 2]
