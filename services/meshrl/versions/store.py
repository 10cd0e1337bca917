"""The bytes of versions at a hub or a relay: streamed versions in a spool folder, publishers' files by reference.

`<spool>/<artifact_id>/` holds `manifest.json` and, for a streamed version, its payload. The hub deletes, since it knows
who may still fetch: its spool, and a publisher's files if the manifest of the same artifact lies beside them. An engine
that may fetch a delta can fetch its whole chain, so a retired version stays until no delta leads on from it; its folder
has the file `retired`.

`<spool>/room/` has the files of a large version that is gone, while versions of the same layout follow each other: the
next one is written over them, which is several times as fast as to make and to free files.

Blocking. Safe for threads as long as no artifact is deleted while it is used.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger

from meshrl.core.durable import write_file
from meshrl.versions.deltas import chains
from meshrl.versions.deltas.chains import JOINED, MANIFEST
from meshrl.versions.version_bytes import VersionBytes, payload_files, room_for
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id as artifact_id_of
from meshrl.wire.manifest_file import from_json, manifest_path, open_regular, to_json
from meshrl.wire.saved_steps import step_of
from meshrl.wire.types import Chunk, FileEntry, Manifest, Transport, VersionKind

RETIRED = "retired"
ROOM = "room"
SPARE_BYTES = 2**20  # never used by versions: the log needs room to say what becomes of them

Chain = Mapping[str, VersionBytes]
"""A delta and the versions below it, by artifact, the anchor first."""


class VersionStore:
    """`artifacts`: those that are not retired, by id."""

    def __init__(self, spool_dir: Path, *, keeps_chains: bool = True) -> None:
        """`keeps_chains`: what deltas lead on from stays, as at a hub."""
        self._spool_dir, self._room, self._keeps_chains = spool_dir, spool_dir / ROOM, keeps_chains
        self.artifacts: dict[str, VersionBytes] = {}
        # Parts of the chains of deltas: retired versions, and merged deltas, by artifact.
        self._parts: dict[str, VersionBytes] = {}
        self._chains: dict[str, Chain] = {}  # of deltas, by artifact
        self._damaged: set[str] = set()  # artifacts that changed at rest
        self._merging = threading.Lock()
        self._changing = threading.Lock()  # the parts and chains: an engine may ask for some while others are deleted

    def prepare(self, live: Collection[str]) -> None:
        """Loads `live` artifacts from the spool, and what they lead on from, and deletes the rest."""
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        self.drop_room()
        for folder in [folder for folder in self._spool_dir.iterdir() if folder.is_dir()]:
            try:
                manifest = from_json((folder / MANIFEST).read_bytes())
            except (OSError, ValueError) as error:  # engines that need it will be refused; the publisher can restage
                if folder.name in live:
                    logger.error("manifest of artifact {} is lost: {}", folder.name, error)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            if folder.name in live:
                self.artifacts[folder.name] = self._load(manifest, folder)
            elif (folder / RETIRED).exists():
                self._parts[folder.name] = chains.stored(manifest, folder)
            else:  # the hub ended before it was deleted, or marked
                self._parts[folder.name] = self._load(manifest, folder)
            for path in folder.glob(f"{JOINED}/*/{MANIFEST}"):
                with suppress(OSError, ValueError):  # damaged: it cannot be fetched
                    merged = from_json(path.read_bytes())
                    self._parts[artifact_id_of(merged)] = chains.stored(merged, path.parent)
        known = {**self._parts, **self.artifacts}
        for artifact_id, held in self.artifacts.items():
            if self._has_chain(held.manifest) and (chain := _chain_of(artifact_id, known)) is not None:
                self._chains[artifact_id] = chain
        self._delete_unneeded()

    def _has_chain(self, manifest: Manifest) -> bool:
        return self._keeps_chains and manifest.kind is VersionKind.DELTA and manifest.transport is not Transport.NCCL

    def _load(self, manifest: Manifest, folder: Path) -> VersionBytes:
        held, has_bytes = VersionBytes(manifest, folder=folder), False
        if held.missing:
            for file in held.files:
                with open(file.path, "ab") as payload:  # a hub may have ended before it had all its bytes
                    has_bytes |= payload.tell() > 0
                    payload.truncate(file.num_bytes)
            if has_bytes:
                held.find()
        return held

    def open(self, artifact_id: str, manifest: Manifest) -> None:
        """Makes room for an artifact, once.

        Raises OVERLOADED without room, UNKNOWN_VERSION for a delta whose base is not here, or not whole.
        """
        if artifact_id in self.artifacts:
            return
        folder = self._spool_dir / artifact_id
        if self._has_chain(manifest):
            with self._changing:
                self._chains[artifact_id] = {**self._base_of(manifest), artifact_id: chains.stored(manifest, folder)}
        with room_for(manifest, self._spool_dir):
            taken = self._take_room(manifest, folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RETIRED).unlink(missing_ok=True)
            write_file(folder / MANIFEST, to_json(manifest))
            if taken:
                self.artifacts[artifact_id] = VersionBytes(manifest, folder=folder)
                return
            streamed = manifest.transport is Transport.STREAM
            if streamed and shutil.disk_usage(folder).free < manifest.payload_bytes + SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.artifacts[artifact_id] = self._load(manifest, folder)

    def _take_room(self, manifest: Manifest, folder: Path) -> bool:
        """Makes the files of a version that is gone those of a new one; deletes them where they do not fit."""
        with self._changing:
            if not self._room.exists():
                return False
            found = [path.stat().st_size for path in sorted(self._room.iterdir())]
            streamed = manifest.transport is Transport.STREAM
            if streamed and not folder.exists() and found == _lengths(payload_files(manifest, self._room)):
                self._room.rename(folder)
                return True
        self.drop_room()
        return False

    def _keep_room(self, held: VersionBytes, newest: VersionBytes) -> None:
        """Keeps the files of a version that is deleted, if the newest one is like it and there are none yet."""
        in_parts = held.manifest.transport is Transport.STREAM and len(held.files) > 1
        if held.missing or not in_parts:  # a thread may still write what is missing
            return
        with self._changing, suppress(OSError):  # then they are deleted
            if _lengths(held.files) == _lengths(newest.files):
                self._room.mkdir()
                for file in held.files:
                    os.rename(file.path, self._room / Path(file.path).name)

    def drop_room(self) -> None:
        shutil.rmtree(self._room, ignore_errors=True)

    def check_base(self, artifact_id: str, manifest: Manifest) -> None:
        """Raises UNKNOWN_VERSION for a delta whose base is not here, not whole or has changed."""
        if self._has_chain(manifest) and artifact_id not in self.artifacts:
            self._base_of(manifest)

    def _base_of(self, manifest: Manifest) -> Chain:
        for artifact_id, base in list(self.artifacts.items()):
            if not _is_base(base, manifest):
                continue
            chain = self._chains.get(artifact_id) if self._has_chain(base.manifest) else {artifact_id: base}
            if chain is None:
                logger.warning("the chain of version {} is gone", base.manifest.version)
            elif not self._damaged.intersection(chain):
                return chain
        text = f"version {manifest.version} is a delta from version {manifest.base_version}, which is not at this hub"
        raise MeshError(Reason.UNKNOWN_VERSION, f"{text}; send the version in full")

    def steps(self, artifact_id: str, held_root: bytes, *, whole: bool) -> tuple[Manifest, ...]:
        """The manifests that an engine applies to reach a delta; all of them can be read then. Parameters as of
        `chains.steps_to`. Raises UNKNOWN_VERSION when parts of the chain are gone."""
        version, chain = self.held(artifact_id).manifest.version, self._chains.get(artifact_id)
        if chain is None:
            raise MeshError(Reason.UNKNOWN_VERSION, f"the chain of version {version} is gone")
        with self._merging:  # deltas are merged once
            found = chains.steps_to(list(chain.values()), held_root, whole=whole)
        merged = {artifact_id_of(part.manifest): part for part in found if part not in chain.values()}
        with self._changing:
            self._parts.update(merged)
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

        It stays as long as a delta leads on from it.
        """
        with self._changing:
            held = self.artifacts.pop(artifact_id, None)
            self._chains.pop(artifact_id, None)
            stays = any(artifact_id in chain for chain in self._chains.values())
            newest = next(reversed(self.artifacts.values()), None)
            if held is not None and stays:
                self._parts[artifact_id] = held
        if stays:
            with suppress(OSError):  # a full disk: then a later start checks its bytes
                (self._spool_dir / artifact_id / RETIRED).touch()
        else:
            if held is not None and newest is not None:
                self._keep_room(held, newest)
            self._remove(artifact_id, paths)
        self._delete_unneeded()
        if newest is None:
            self.drop_room()

    def _delete_unneeded(self) -> None:
        with self._changing:
            needed = {*self.artifacts, *(name for chain in self._chains.values() for name in chain)}
            unneeded = [
                part
                for name, part in self._parts.items()
                if name not in needed and part.folder.parent == self._spool_dir
            ]
        for part in unneeded:
            was_retired = (part.folder / RETIRED).exists()
            self._remove(part.folder.name, [file.path for file in part.manifest.files] if was_retired else ())

    def _remove(self, artifact_id: str, paths: Sequence[str]) -> None:
        folder = self._spool_dir / artifact_id
        with self._changing:
            self._parts = {name: part for name, part in self._parts.items() if not part.folder.is_relative_to(folder)}
        shutil.rmtree(folder, ignore_errors=True)
        _delete_files(artifact_id, list(map(Path, paths)))


def _lengths(files: Sequence[FileEntry]) -> list[int]:
    return [file.num_bytes for file in files]


def _is_base(held: VersionBytes, delta: Manifest) -> bool:
    base = held.manifest
    same = (base.result_root, base.version) == (delta.base_root, delta.base_version)
    return same and base.transport is not Transport.NCCL and not held.missing


def _chain_of(artifact_id: str, known: Mapping[str, VersionBytes]) -> Chain | None:
    """None where a part of it is gone."""
    chain = {artifact_id: known[artifact_id]}
    while (manifest := known[artifact_id].manifest).kind is VersionKind.DELTA:
        bases = (name for name, held in known.items() if _is_base(held, manifest))
        if (base := next(bases, None)) is None:
            return None
        artifact_id, chain = base, {base: known[base], **chain}
    return chain


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
