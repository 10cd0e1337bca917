"""Checks of a WeightSync: answers and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert import from_proto
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, result_root
from meshrl.wire.manifest_checks import violations
from meshrl.wire.types import Manifest
from meshrl_conformance.every_service import FAR_VERSION, bookmarks
from meshrl_conformance.probe import NotCheckedError, Probe, RefusedError, broken_by, checks, must

QUIET_S = 1.0  # how long a watch is read where no version is committed that it must send
MAX_CHUNK_BYTES = 64 * 2**20


async def _newest(probe: Probe) -> tuple[Manifest, str]:
    """With its id at the hub. Raises NotCheckedError before the first version."""
    try:
        (answer,) = await probe.call("GetManifest", pb.GetManifestRequest())
    except RefusedError as refusal:
        if refusal.code is Reason.UNKNOWN_VERSION.code:
            raise NotCheckedError("no version is committed yet") from refusal
        raise
    try:
        return from_proto(Manifest, answer.manifest, "manifest"), answer.artifact_id
    except MeshError as error:
        broken_by(error)


@checks("weights.engines")
async def _engines(probe: Probe) -> None:
    (answer,) = await probe.call("ListEngines", pb.ListEnginesRequest())
    names = [engine.engine_id for engine in answer.engines]
    must(len(set(names)) == len(names) and all(names), f"the engines are called {', '.join(map(repr, names))}")
    for engine in answer.engines:
        serves = engine.HasField("serving_version")
        must(serves or not engine.routable, f"engine {engine.engine_id} is routable and serves no version")


@checks("weights.unknown-version")
async def _unknown_version(probe: Probe) -> None:
    await probe.refused("GetManifest", pb.GetManifestRequest(version=FAR_VERSION), reason=Reason.UNKNOWN_VERSION)
    await probe.refused("Fetch", pb.FetchRequest(artifact_id="0" * 64), reason=Reason.UNKNOWN_VERSION)


@checks("weights.artifact")
async def _artifact(probe: Probe) -> None:
    manifest, told = await _newest(probe)
    made = artifact_id(manifest)
    must(told == made, f"the artifact id of version {manifest.version} is {made}, the hub says {told}")


@checks("weights.manifest")
async def _manifest(probe: Probe) -> None:
    manifest, _ = await _newest(probe)
    found = violations(manifest, max_chunk_bytes=MAX_CHUNK_BYTES)
    must(not found, "; ".join(f"{path} {problem}" for path, problem in found))
    whole = manifest.base_version is None
    must(not whole or manifest.result_root == result_root(manifest.tensors), "result_root is not that of the tensors")


@checks("weights.watch")
async def _watch(probe: Probe) -> None:
    try:
        newest: Manifest | None = (await _newest(probe))[0]
    except NotCheckedError:
        newest = None
    events: list[Any] = []

    def has_newest(answers: Any) -> bool:
        events[:] = answers
        last = answers[-1].version
        return newest is not None and (last.epoch, last.version) == (newest.epoch, newest.version)

    try:  # it never ends by itself
        async with asyncio.timeout(QUIET_S if newest is None else probe.deadline_s):
            await probe.call("WatchVersions", pb.WatchVersionsRequest(), until=has_newest)
    except TimeoutError:
        pass
    revisions = [event.revision for event in events]
    must(revisions == sorted(set(revisions)), f"the revisions are {revisions[:8]}")
    unsaid = [event.version.version for event in events if not event.version.state]
    must(not unsaid, f"versions {unsaid} have no state")
    versions = {(event.version.epoch, event.version.version) for event in events}
    if newest is not None:
        told = (newest.epoch, newest.version) in versions
        must(told, f"it does not tell version {newest.version}, which is committed")


@checks("weights.bookmarks")
async def _bookmarks(probe: Probe) -> None:
    await bookmarks(probe, "WatchVersions", pb.WatchVersionsRequest(run_id="-"))


@checks("weights.lease")
async def _lease(probe: Probe) -> None:
    report = pb.SessionRequest(lease_id="conformance: no such lease", state=pb.AGENT_STATE_JOINING)
    await probe.refused("Session", report, reason=Reason.LEASE_EXPIRED)
