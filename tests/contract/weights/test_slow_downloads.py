"""A download that may only go slowly waits before it asks, longer than others wait for what stands still."""

from __future__ import annotations

import asyncio
from typing import Any

from meshrl.inference.agent.version_loader import VersionFetcher
from meshrl.versions.downloads import Downloader
from meshrl.versions.sources import LinkLimits
from meshrl.wire.types import Transport

MBPS = 0.1  # 45 kB at this rate take 3.6 s; a claim that stands still is taken over after 2 s


async def test_claims_that_wait_for_the_rate_limit_and_are_taken_over_break_no_download(mesh: Any, state: Any) -> None:
    published = state(1)
    await mesh.publisher(Transport.STREAM).publish(0, published)
    client = mesh.client()
    downloader = Downloader(client, LinkLimits(connections=4, mbps=MBPS))
    try:
        manifest, artifact_id = await client.get_manifest(version=0)
        held = await asyncio.wait_for(VersionFetcher(downloader).fetch(manifest, artifact_id), 120.0)
        found = held.tensors(manifest)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in published.items()
        }
        held.release()
    finally:
        await downloader.close()
