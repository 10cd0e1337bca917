"""`meshrl weights`: the versions that the hub knows, and the engines that serve them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import asdict

import click

from meshrl.cli.command import (
    CALL_DEADLINE_S,
    address_option,
    ago,
    folder_option,
    json_option,
    options_for,
    print_json,
    print_table,
    run,
    the_address,
)
from meshrl.cli.run_folder import RunFolder
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.wire.types import EngineInfo, VersionInfo

QUIET_S = 0.5
"""The hub's watch sends what has been at once; when nothing came for this long, all of it has come."""


async def _versions(address: str, run_id: str, options: ChannelOptions) -> list[VersionInfo]:
    """The last event of each version. The hub keeps those that may still be served or fetched."""
    newest: dict[tuple[str, int, int], VersionInfo] = {}
    async with WeightSyncClient(address, options) as client:
        await client.wait_until_serving(CALL_DEADLINE_S)
        async with aclosing(client.watch_versions(run_id)) as events:
            with suppress(TimeoutError, StopAsyncIteration):  # no more of them
                while True:
                    version = (await asyncio.wait_for(anext(events), QUIET_S)).version
                    newest[version.run_id, version.epoch, version.version] = version
    return sorted(newest.values(), key=lambda version: (version.run_id, version.epoch, version.version))


async def _engines(address: str, pool: str, options: ChannelOptions) -> tuple[EngineInfo, ...]:
    async with WeightSyncClient(address, options) as client:
        return await client.list_engines(pool)


@click.group()
def weights() -> None:
    """Look at weight versions and the engines that serve them.

    Versions go forward only: to go back to an earlier policy, resume the run from its checkpoint (--ckpt.resume-step).
    """


@weights.command(name="list")
@folder_option
@address_option
@click.option("--run-id", default="", help="Only the versions of this run.")
@json_option
def list_versions(folder: RunFolder, address: str | None, run_id: str, as_json: bool) -> None:
    """List the versions that the hub remembers, oldest first."""
    found = run(_versions(the_address(folder, "weights", address), run_id, options_for(folder, reconnect_s=0.0)))
    if as_json:
        print_json(
            [
                {**asdict(version), "state": version.state.value, "transport": version.transport.value}
                for version in found
            ]
        )
        return
    rows = [
        (version.run_id, version.epoch, version.version, version.state.value, f"{version.num_bytes / 1e6:.1f} MB",
         version.transport.value, version.artifact_id[:16])
        for version in found
    ]  # fmt: skip
    print_table(("run", "epoch", "version", "state", "size", "transport", "artifact"), rows)


@weights.command()
@folder_option
@address_option
@click.option("--pool", default="", help="Only the engines of this pool.")
@json_option
def engines(folder: RunFolder, address: str | None, pool: str, as_json: bool) -> None:
    """List the engines that have registered at the hub, with the version that each serves."""
    found = run(_engines(the_address(folder, "weights", address), pool, options_for(folder)))
    if as_json:
        print_json([{**asdict(engine), "state": engine.state.value} for engine in found])
        return
    rows = [
        (engine.engine_id, engine.url, engine.engine_pool or "-", engine.state.value, engine.serving_version,
         "yes" if engine.routable else "no", ago(engine.last_seen_s),
         engine.last_fault.message if engine.last_fault else "")
        for engine in found
    ]  # fmt: skip
    print_table(("engine", "url", "pool", "state", "version", "takes requests", "seen", "last fault"), rows)
