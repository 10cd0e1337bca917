"""The bytes of versions at a hub or a relay: streamed versions in a spool folder, publishers' files by reference.

`<spool>/<artifact_id>/` holds `manifest.json`, for a streamed version `payload`, and for a delta the chain of versions
below it (`deltas.chains`). The hub deletes, since it knows who may still fetch: its spool, and a publisher's files if
the manifest of the same artifact lies beside them.

Blocking. Safe for threads as long as no artifact is deleted while it is used.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger

from meshrl.core.durable import write_file
from meshrl.versions.deltas import chains
from meshrl.versions.deltas.chains import MANIFEST, PAYLOAD
from meshrl.versions.version_bytes import VersionBytes, room_for
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id as artifact_id_of
from meshrl.wire.manifest_file import from_json, manifest_path, open_regular, to_json
from meshrl.wire.saved_steps import step_of
from meshrl.wire.types import Chunk, Manifest, Transport, VersionKind

SPARE_BYTES = 2**20  # never used by versions: the log needs room to say what becomes of them


class VersionStore:
    """`artifacts`: those that are not retired, by id."""

    def __init__(self, spool_dir: Path) -> None:
        self._spool_dir = spool_dir
        self.artifacts: dict[str, VersionBytes] = {}
        # Parts of the chains of deltas: retired versions, and merged deltas, by artifact.
        self._parts: dict[str, VersionBytes] = {}
        self._chains: dict[str, chains.Chain] = {}  # by the artifact of its last version, so that none is read twice
        self._damaged: set[str] = set()  # artifacts that changed at rest
        self._merging = threading.Lock()

    def prepare(self, live: Collection[str]) -> None:
        """Loads the manifests of `live` artifacts from the spool and deletes the rest."""
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        folders = [folder for folder in self._spool_dir.iterdir() if folder.is_dir()]
        for folder in folders:
            if folder.name not in live:
                continue
            try:
                manifest = from_json((folder / MANIFEST).read_bytes())
            except (OSError, ValueError) as error:  # engines that need it will be refused; the publisher can restage
                logger.error("manifest of artifact {} is lost: {}", folder.name, error)
                continue
            self.artifacts[folder.name] = self._load(manifest, folder)
        for folder in folders:
            if folder.name not in live:
                self.delete(folder.name, ())
        for path in self._spool_dir.glob(f"*/*/**/{MANIFEST}"):  # which an earlier start has named to engines
            with suppress(OSError, ValueError):  # damaged: it cannot be fetched
                part = from_json(path.read_bytes())
                self._parts[artifact_id_of(part)] = chains.stored(part, path.parent)

    def _load(self, manifest: Manifest, folder: Path) -> VersionBytes:
        held = VersionBytes(manifest, file=folder / PAYLOAD)
        if held.missing and (folder / PAYLOAD).exists():
            held.find()
        return held

    def open(self, artifact_id: str, manifest: Manifest, *, with_base: bool = True) -> None:
        """Makes room for an artifact, once; `with_base`: a delta keeps its chain below it, as at a hub.

        Raises OVERLOADED without room, UNKNOWN_VERSION for a delta whose base is not here, or not whole.
        """
        if artifact_id in self.artifacts:
            return
        folder = self._spool_dir / artifact_id
        with room_for(manifest, self._spool_dir):
            folder.mkdir(parents=True, exist_ok=True)
            if _has_chain(manifest) and with_base:
                below = chains.link_base(self._base_of(manifest), folder)
                self._chains[artifact_id] = {**below, artifact_id: chains.stored(manifest, folder)}
            write_file(folder / MANIFEST, to_json(manifest))
            if manifest.transport is Transport.STREAM:
                if shutil.disk_usage(folder).free < manifest.payload_bytes + SPARE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with (folder / PAYLOAD).open("ab") as payload:
                    payload.truncate(manifest.payload_bytes)
        self.artifacts[artifact_id] = self._load(manifest, folder)

    def check_base(self, artifact_id: str, manifest: Manifest) -> None:
        """Raises UNKNOWN_VERSION for a delta whose base is not here, not whole or has changed."""
        if _has_chain(manifest) and artifact_id not in self.artifacts:
            self._base_of(manifest)

    def _base_of(self, manifest: Manifest) -> chains.Chain:
        for artifact_id, base in list(self.artifacts.items()):
            if base.manifest.result_root != manifest.base_root or base.manifest.version != manifest.base_version:
                continue
            if base.manifest.transport is Transport.NCCL or base.missing:
                continue
            try:
                chain = self._chain(artifact_id, base)
            except (OSError, ValueError) as error:  # retired meanwhile, or damaged
                logger.warning("the chain of version {} is gone: {!r}", base.manifest.version, error)
                continue
            if not self._damaged.intersection(chain):
                return chain
        text = f"version {manifest.version} is a delta from version {manifest.base_version}, which is not at this hub"
        raise MeshError(Reason.UNKNOWN_VERSION, f"{text}; send the version in full")

    def _chain(self, artifact_id: str, version: VersionBytes) -> chains.Chain:
        chain = self._chains.get(artifact_id)
        if chain is None:
            chain = self._chains[artifact_id] = chains.chain_of(version.manifest, version.folder)
        return chain

    def steps(self, artifact_id: str, held_root: bytes, *, whole: bool) -> tuple[Manifest, ...]:
        """The manifests that an engine applies to reach a delta; all of them can be read then. Parameters as of
        `chains.steps_to`. Raises UNKNOWN_VERSION when parts of the chain are gone."""
        artifact = self.held(artifact_id)
        with self._merging:  # deltas are merged once
            try:
                chain = self._chain(artifact_id, artifact)
                found = chains.steps_to(list(chain.values()), held_root, whole=whole)
            except (OSError, ValueError) as error:
                text = f"the chain of version {artifact.manifest.version} is gone: {error}"
                raise MeshError(Reason.UNKNOWN_VERSION, text) from error
        self._parts.update((artifact_id_of(part.manifest), part) for part in found)
        return tuple(part.manifest for part in found)

    def part(self, artifact_id: str) -> Manifest | None:
        """The manifest of a part of some delta's chain, if the artifact is one."""
        part = self._parts.get(artifact_id)
        return None if part is None else part.manifest

    def held(self, artifact_id: str) -> VersionBytes:
        held = self.artifacts.get(artifact_id) or self._parts.get(artifact_id)
        if held is None:
            raise MeshError(Reason.UNKNOWN_VERSION, f"artifact {artifact_id} is unknown or retired")
        return held

    def read(self, artifact_id: str, offset: int, end: int, chunk_bytes: int) -> Iterator[Chunk]:
        """As `VersionBytes.read`; an artifact that changed at rest is no base of deltas from then on."""
        try:
            yield from self.held(artifact_id).read(offset, end, chunk_bytes)
        except MeshError as error:
            if error.reason is Reason.DIGEST_MISMATCH:
                self._damaged.add(artifact_id)
            raise

    def delete(self, artifact_id: str, paths: Sequence[str]) -> None:
        """Deletes the spool of an artifact and those of its publisher's files that may go; logs errors.

        Files of a full version stay as long as a delta leads on from it.
        """
        self.artifacts.pop(artifact_id, None)
        self._chains.pop(artifact_id, None)
        folder = self._spool_dir / artifact_id
        self._parts = {name: part for name, part in self._parts.items() if not part.folder.is_relative_to(folder)}
        files = {artifact_id: list(map(Path, paths)), **chains.files_below(folder)}
        shutil.rmtree(folder, ignore_errors=True)
        for other in self.artifacts:
            for needed in (other, *chains.files_below(self._spool_dir / other)):
                files.pop(needed, None)
        for name, of_one in files.items():
            _delete_files(name, of_one)


def _has_chain(manifest: Manifest) -> bool:
    return manifest.kind is VersionKind.DELTA and manifest.transport is not Transport.NCCL


def _delete_files(artifact_id: str, paths: Sequence[Path]) -> None:
    payloads: dict[Path, list[Path]] = {}
    for path in paths:
        if path.exists():  # else its run has ended, and deleted what it had in memory
            payloads.setdefault(manifest_path(path), []).append(path)
    for manifest_file, of_one in payloads.items():
        shown = ", ".join(map(str, of_one))
        try:
            with open(open_regular(manifest_file), "rb") as file:
                manifest = from_json(file.read())
            if artifact_id_of(manifest) != artifact_id:
                logger.warning("{} is kept: the manifest beside it is of another artifact", shown)
                continue
            for path in (*of_one, manifest_file):
                path.unlink(missing_ok=True)
            folder_of_step = manifest_file.parent
            if step_of(folder_of_step) is not None and not any(folder_of_step.iterdir()):
                folder_of_step.rmdir()
        except (OSError, ValueError) as error:  # the version is retired all the same; only disk space is lost
            logger.warning("{} is kept: {}", shown, error)
