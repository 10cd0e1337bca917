"""What a report costs the weight hub after many versions, how large its log is then, and how long a restart takes.

Usage: bench_hub.py [--engines N] [--versions N] [--folder FOLDER]
A hub with its log on disk takes version after version, each staged, sealed, decided and committed by reports of every
engine, as over the wire but without gRPC. Around the versions of the table every report is timed from its arrival until
the hub has done all that follows from it, log included; engines then send what agents send, fetching and applying
included, and a heartbeat. Between these, two reports an engine and version are enough to bring a version through.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from loguru import logger

from meshrl.weights.config import WeightsConfig
from meshrl.weights.coordinator.engine_groups import BroadcastRequest
from meshrl.weights.hub import LOG_FILE, Hub
from meshrl.weights.main import build_hub
from meshrl.wire.manifest import artifact_id, build_manifest
from meshrl.wire.types import (
    ActivationRequest,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    CollectivePlan,
    Manifest,
    TensorEntry,
    Transport,
)

MEASURED = 20  # versions before each row of the table
ROWS = (100, 1_000, 10_000, 20_000)


def manifest_of(version: int) -> Manifest:
    """A version whose bytes do not pass the hub, as with transport nccl: this is about its decisions."""
    tensor = TensorEntry(
        name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=version.to_bytes(16, "little")
    )
    return build_manifest(
        run_id="run", epoch=1, version=version, transport=Transport.NCCL, tensors=(tensor,), chunks=(),
        collective=CollectivePlan(num_senders=1, bucket_bytes=64),
    )  # fmt: skip


class Engines:
    """Agents that report to the hub as their rules would have them."""

    def __init__(self, hub: Hub, count: int) -> None:
        self.hub, self.names = hub, [f"engine-{number:03}" for number in range(count)]
        self._leases: dict[str, str] = {}
        self.costs_s: list[float] = []

    async def register(self) -> None:
        for name in self.names:
            lease = await self.hub.register(
                AgentRegistration(
                    engine_id=name, url="http://engine", transports=(Transport.STREAM, Transport.NCCL),
                    layout_signature=b"l", collective_ranks=1, collective_backend="gloo", host="here",
                )
            )  # fmt: skip
            self._leases[name] = lease.lease_id
            self.hub.coordinator.connect(lease.lease_id, time.monotonic())

    async def report(self, name: str, state: AgentState, timed: bool, **more: object) -> None:
        hub = self.hub
        report = AgentReport(lease_id=self._leases[name], state=state, group_generation=1, **more)  # type: ignore[arg-type] # fields by name
        began_s = time.perf_counter()
        await hub._actions.put(hub.coordinator.report(report, time.monotonic()))
        if timed:
            self.costs_s.append(time.perf_counter() - began_s)

    async def take(self, manifest: Manifest, timed: bool) -> None:
        """Every engine prepares, applies and serves a version that somebody activates."""
        artifact, before = artifact_id(manifest), manifest.version - 1 if manifest.version else None
        target = {"target_version": manifest.version, "target_artifact_id": artifact}
        hub = self.hub
        outcome = asyncio.create_task(
            hub.activate_version(ActivationRequest(run_id="run", version=manifest.version, prepare_deadline_s=60.0))
        )
        for name in self.names if timed else ():
            await self.report(name, AgentState.FETCHING, timed, serving_version=before, **target)
        for name in self.names:
            await self.report(name, AgentState.PREPARED, timed, serving_version=before, **target)
        applied = ApplyReport(
            version=manifest.version, root=manifest.result_root, pause_s=0.01, prepare_s=0.1, requests_kept=0
        )
        for name in self.names:
            if timed:
                await self.report(name, AgentState.APPLYING, timed, serving_version=before, **target)
            await self.report(name, AgentState.READY, timed, serving_version=manifest.version, applied=applied)
        for name in self.names if timed else ():
            await self.report(name, AgentState.READY, timed, serving_version=manifest.version)
        async with asyncio.timeout(60.0):
            await outcome


async def publish(hub: Hub, manifest: Manifest) -> None:
    async def no_chunks() -> object:
        return
        yield

    staged = await hub.create_version(manifest, no_chunks())  # type: ignore[arg-type] # there are none
    await hub.seal_version(
        run_id="run", epoch=1, version=manifest.version, artifact_id=staged.artifact_id, traceparent=""
    )


async def measure(num_engines: int, num_versions: int, folder: Path) -> None:
    config = WeightsConfig(output_dir=folder, lease_s=3600.0)
    hub = build_hub(config)
    await hub.start()
    engines = Engines(hub, num_engines)
    await engines.register()
    await open_group(hub, engines)
    log = folder / "weight_hub" / LOG_FILE
    print("| versions | mean ms a report | median | 99th percentile | records | log KiB |\n|---|---|---|---|---|---|")
    rows = [row for row in ROWS if row <= num_versions] or [num_versions]
    for version in range(rows[-1]):
        timed = any(row - MEASURED <= version < row for row in rows)
        manifest = manifest_of(version)
        await publish(hub, manifest)
        await engines.take(manifest, timed)
        if version + 1 in rows:
            costs_ms = sorted(cost_s * 1000 for cost_s in engines.costs_s)
            engines.costs_s.clear()
            print(
                f"| {version + 1:,} | {statistics.fmean(costs_ms):.3f} | {statistics.median(costs_ms):.3f} "
                f"| {costs_ms[len(costs_ms) * 99 // 100]:.3f} | {len(hub.coordinator.line('run').records)} "
                f"| {log.stat().st_size / 1024:.0f} |",
                flush=True,
            )
    newest, revision = hub.coordinator.line("").records.newest_decided(), hub.coordinator.revision
    await hub.stop()
    began_s = time.perf_counter()
    hub = build_hub(config)
    await hub.start()
    restart_s = time.perf_counter() - began_s
    again = hub.coordinator.line("").records.newest_decided()
    assert newest is not None
    assert again is not None
    assert (again.key, again.state, hub.coordinator.revision) == (newest.key, newest.state, revision)
    await hub.stop()
    print(f"\nRestart after {rows[-1]:,} versions: {restart_s:.3f} s.")


async def open_group(hub: Hub, engines: Engines) -> None:
    request = BroadcastRequest(
        request_id="group", run_id="run", epoch=1, store_address="h:1", backend="gloo", num_senders=1, deadline_s=60.0
    )
    await hub.open_group(request)
    for name in engines.names:
        await engines.report(name, AgentState.JOINING, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--versions", type=int, default=ROWS[-1])
    parser.add_argument("--folder", type=Path, help="where the log is written; by default a temporary folder")
    options = parser.parse_args()
    logger.remove()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        asyncio.run(measure(options.engines, options.versions, Path(folder)))


if __name__ == "__main__":
    main()
