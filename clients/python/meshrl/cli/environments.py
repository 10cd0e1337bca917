"""`meshrl envs`: the environments at a run's rollout services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

import click

from meshrl.cli.command import (
    address_option,
    folder_option,
    json_option,
    options_for,
    print_json,
    print_table,
    run,
    the_address,
)
from meshrl.cli.run_folder import RunFolder
from meshrl.client import ChannelOptions, RolloutClient
from meshrl.wire.types import EnvironmentInfo


async def _hosted(addresses: Sequence[str], options: ChannelOptions) -> list[tuple[str, EnvironmentInfo]]:
    async def of(address: str) -> list[tuple[str, EnvironmentInfo]]:
        async with RolloutClient(address, options) as client:
            return [(address, environment) for environment in await client.list_environments()]

    return [row for rows in await asyncio.gather(*map(of, addresses)) for row in rows]


@click.command()
@folder_option
@address_option
@json_option
def envs(folder: RunFolder, address: str | None, as_json: bool) -> None:
    """List the environments that rollout services host, with their tasks."""
    first = the_address(folder, "rollout", address)
    hosted = run(_hosted((first,) if address else folder.addresses("rollout"), options_for(folder)))
    if as_json:
        print_json([{"address": where, **asdict(environment)} for where, environment in hosted])
        return
    rows = [
        (
            environment.name,
            environment.taskset,
            "infinite" if environment.num_tasks is None else environment.num_tasks,
            ", ".join(environment.agents),
            environment.package_version,
            where,
        )
        for where, environment in hosted
    ]
    print_table(("name", "taskset", "tasks", "agents", "package", "served at"), rows)
