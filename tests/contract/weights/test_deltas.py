"""Versions as deltas, from a real publisher over a real hub into engines: bit-exact or refused, in few bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.client import WeightSyncClient
from meshrl.inference.agent.agent import WeightAgent
from meshrl.inference.agent.version_loader import VersionFetcher
from meshrl.versions.downloads import Downloader
from meshrl.versions.sources import LinkLimits
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Activation, Chunk, FoundVersion, Transport, VersionKind
from weight_mesh import MemoryEngine, Mesh, make_state

State = dict[str, torch.Tensor]
VERSIONS, ANCHOR_EVERY = 13, 5
WAYS = (Transport.STREAM, Transport.FILESYSTEM)  # of versions in full; deltas go through the hub
FULL_BYTES = 2 * (97 * 33 + 61 * 127 + 33)


@pytest.fixture
def first() -> State:
    """The weights of the first version."""
    return make_state(0, dtype=torch.bfloat16)


@pytest.fixture(params=["image", "patched"])
def make_engine(request: pytest.FixtureRequest) -> Callable[[], MemoryEngine]:
    """Engines that serve such weights; deltas apply to a copy on their host, staged from files or not, or to what they
    serve."""

    def make() -> MemoryEngine:
        engine = MemoryEngine(make_state(7, dtype=torch.bfloat16))
        engine.patches, engine.stages_from_files = request.param == "patched", request.param != "image"
        return engine

    return make


def stepped(state: Mapping[str, torch.Tensor], seed: int) -> State:
    """The weights after a step in which 2% of them changed by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        up = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        changed = torch.rand(tensor.shape, generator=generator) < 0.02
        moved[name] = (tensor.view(torch.int16) + torch.where(changed, up, 0).to(torch.int16)).view(torch.bfloat16)
    return moved


async def serve(client: WeightSyncClient, version: int, *, min_ready: int = 1) -> Activation:
    return await client.activate_version(run_id="run", version=version, min_ready=min_ready, prepare_deadline_s=60.0)


def flip_base(agent: WeightAgent, engine: MemoryEngine, at: int) -> None:
    """Flips a bit in what the next delta leads from."""
    if engine.patches:
        embed = engine.live["model.embed.weight"].view(-1)
        embed.view(torch.int16)[at % len(embed)] ^= 0x10
        return
    image = agent._lines["run"].loader._image
    assert image is not None
    image.held.parts[0][1][at % FULL_BYTES] ^= 0x10


async def way(client: WeightSyncClient, version: int, held_root: bytes = b"") -> FoundVersion:
    return await client.find_version(version=version, held_root=held_root)


@pytest.mark.parametrize("transport", WAYS)
async def test_chained_deltas_with_flips_on_the_wire_and_in_memory_are_served_to_the_bit(
    mesh: Mesh,
    first: State,
    make_engine: Callable[[], MemoryEngine],
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
) -> None:
    state = first
    engine, late = make_engine(), make_engine()
    agent = mesh.start_agent("e", engine)
    publisher, client = mesh.publisher(transport, anchor_every=ANCHOR_EVERY), mesh.client()
    flips = {"wire": 0}
    real_fetch = WeightSyncClient.fetch

    async def noisy_fetch(self: WeightSyncClient, *args: Any, **more: Any) -> AsyncGenerator[Chunk, None]:
        async for chunk in real_fetch(self, *args, **more):
            if flips["wire"]:
                flips["wire"] -= 1
                damaged = bytearray(chunk.data)
                damaged[len(damaged) // 2] ^= 1
                chunk = replace(chunk, data=bytes(damaged))
            yield chunk

    monkeypatch.setattr(WeightSyncClient, "fetch", noisy_fetch)
    sizes = []
    for version in range(VERSIONS + 1):
        flips["wire"] = int(version % 7 == 3)
        report = await publisher.publish(version, state)
        activation = await serve(client, version, min_ready=0)
        assert (engine.version, engine.root) == (version, report.root)
        assert engine.holds(state)
        assert {each.applied.root for each in activation.engines} == {report.root}
        sizes.append(report.num_bytes)
        if version % 11 == 5:  # bits flip where the next delta leads from, whether it changes them or not
            flip_base(agent, engine, version * 997)
        if version == VERSIONS - 10:
            mesh.start_agent("late", late)
        state = stepped(state, version)
    await mesh.until(lambda: late.version == VERSIONS)
    assert late.root == engine.root
    in_full = [version for version, size in enumerate(sizes) if size == FULL_BYTES]
    assert in_full == list(range(0, VERSIONS + 1, ANCHOR_EVERY + 1))
    assert max(size for size in sizes if size != FULL_BYTES) < FULL_BYTES / 15


@pytest.mark.parametrize("transport", WAYS)
async def test_who_joins_fetches_an_anchor_and_one_delta_and_who_missed_versions_one_delta(
    mesh: Mesh, first: State, make_engine: Callable[[], MemoryEngine], transport: Transport
) -> None:
    publisher, client = mesh.publisher(transport, anchor_every=64), mesh.client()
    engine = make_engine()
    mesh.start_agent("e", engine)
    state, roots = first, []
    for version in range(9):
        report = await publisher.publish(version, state)
        await serve(client, version)
        roots.append(report.root)
        state = stepped(state, version)

    joining = await way(client, 8)
    assert [step.kind for step in joining.steps] == [VersionKind.FULL, VersionKind.DELTA]
    assert [step.version for step in joining.steps] == [0, 8]
    behind = await way(client, 8, roots[3])
    assert [(step.base_version, step.version) for step in behind.steps] == [(3, 8)]
    assert behind.steps[0].payload_bytes < 5 * (await way(client, 8, roots[7])).steps[0].payload_bytes
    assert (await way(client, 8, roots[8])).steps == ()
    assert (await way(client, 8, b"of another model")).steps == joining.steps

    await mesh.restart_hub()  # what leads to a version outlives it
    late = make_engine()
    mesh.start_agent("late", late)
    await mesh.until(lambda: late.version == 8)
    assert late.root == roots[8]
    report = await publisher.publish(9, state)
    assert report.num_bytes < FULL_BYTES / 15
    await serve(client, 9, min_ready=2)
    assert engine.holds(state)
    assert late.holds(state)


@pytest.mark.parametrize("transport", WAYS)
@pytest.mark.parametrize("make_engine", ["image", "image in files", "patched"], indirect=True)
async def test_a_version_that_was_given_up_is_not_in_the_way_of_the_next_one(
    mesh: Mesh,
    first: State,
    make_engine: Callable[[], MemoryEngine],
    tmp_path: Path,
    transport: Transport,
) -> None:
    publisher, client = mesh.publisher(transport, anchor_every=64), mesh.client()
    engine = make_engine()
    agent = mesh.start_agent("e", engine, spool_dir=tmp_path if engine.stages_from_files else None)
    states = [first]
    for seed in range(4):
        states.append(stepped(states[-1], seed))
    await publisher.publish(0, states[0])
    await serve(client, 0)
    report = await publisher.publish(1, states[1])
    await mesh.until(lambda: (prepared := agent._lines["run"].prepared) is not None and prepared.manifest.version == 1)
    if not engine.patches:
        assert agent._lines["run"].loader._image.root == report.root
    report = await publisher.publish(2, states[2])  # 1 is skipped
    await serve(client, 2)
    assert engine.holds(states[2])
    by_delta = "patch" if engine.patches else "stage"
    assert engine.history == [
        "stage 0",
        "pause",
        "apply 0",
        "resume",
        f"{by_delta} 1",
        f"{by_delta} 2",
        "pause",
        "apply 2",
        "resume",
    ]

    await publisher.publish(3, states[3])
    await mesh.until(lambda: (prepared := agent._lines["run"].prepared) is not None and prepared.manifest.version == 3)
    await client.abort_version(run_id="run", epoch=1, version=3, message="no")
    report = await publisher.publish(4, states[4])  # what it would lead from is gone
    assert report.num_bytes == FULL_BYTES
    await serve(client, 4)
    assert engine.holds(states[4])


async def test_a_publishers_files_stay_as_long_as_a_delta_leads_on_from_them(
    mesh: Mesh, first: State, make_engine: Callable[[], MemoryEngine]
) -> None:
    publisher, client = mesh.publisher(Transport.FILESYSTEM, anchor_every=5), mesh.client()
    mesh.start_agent("e", make_engine())
    state, folders = first, []
    for version in range(13):
        await publisher.publish(version, state)
        await serve(client, version)
        state = stepped(state, version)
        folders.append(sorted(path.name for path in (mesh.folder / "broadcasts").iterdir()))
        if version == 8:  # what a hub that restarts knows of them is on its disk
            await mesh.restart_hub()
    assert folders[5] == ["step_0"]
    assert "step_0" not in folders[9]
    assert folders[11] == ["step_6"]
    assert folders[12] == ["step_12", "step_6"]


async def test_bytes_that_changed_in_the_spool_are_not_served_and_the_next_version_comes_in_full(
    mesh: Mesh, first: State, make_engine: Callable[[], MemoryEngine]
) -> None:
    publisher, client = mesh.publisher(Transport.STREAM, anchor_every=64), mesh.client()
    state = first
    engine = make_engine()
    mesh.start_agent("e", engine)
    report = await publisher.publish(0, state)
    await serve(client, 0)
    payload = mesh.folder / "weight_hub" / "artifacts" / report.artifact_id / "payload"
    damaged = bytearray(payload.read_bytes())
    damaged[1000] ^= 1
    payload.write_bytes(damaged)

    late = make_engine()
    mesh.start_agent("late", late)
    await mesh.until(lambda: any(info.last_fault is not None for info in mesh.hub.list_engines("")))
    assert late.version is None
    state = stepped(state, 1)
    report = await publisher.publish(1, state)
    assert report.num_bytes == FULL_BYTES
    await serve(client, 1, min_ready=2)
    assert engine.holds(state)
    assert late.holds(state)


async def test_deltas_come_to_more_fetches_than_asyncio_has_threads(mesh: Mesh, first: State) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))  # which also write what the fetches wait for
    publisher, client = mesh.publisher(Transport.STREAM, anchor_every=64), mesh.client()
    report = await publisher.publish(0, first)
    await publisher.publish(1, stepped(first, 1))
    (delta,) = (await way(client, 1, held_root=report.root)).steps
    downloaders = [Downloader(mesh.client(), LinkLimits()) for _ in range(3)]
    async with asyncio.timeout(60.0):
        fetches = (
            VersionFetcher(downloader).fetch_delta(delta, lambda payload, wait_for: wait_for(len(payload)))
            for downloader in downloaders
        )
        assert {len(payload) for payload in await asyncio.gather(*fetches)} == {delta.payload_bytes}
    for downloader in downloaders:
        await downloader.close()


async def test_a_delta_that_would_not_pay_or_that_leads_from_nowhere_is_not_sent(mesh: Mesh, first: State) -> None:
    publisher = mesh.publisher(Transport.STREAM, anchor_every=64)
    state = first
    await publisher.publish(0, state)
    dense = {name: -3 * tensor for name, tensor in state.items()}
    report = await publisher.publish(1, dense)
    assert report.num_bytes == FULL_BYTES
    report = await publisher.publish(2, stepped(dense, 2))
    assert report.num_bytes < FULL_BYTES / 15
    nowhere = mesh.publisher(Transport.STREAM, anchor_every=64)
    await nowhere.prepare(6, state)
    await nowhere._transport.deliver(6)
    with pytest.raises(MeshError) as refused:
        await mesh.client().create_version((await nowhere.prepare(7, stepped(state, 3))).manifest)
    assert refused.value.reason is Reason.UNKNOWN_VERSION
