"""The bytes of versions at a hub or a relay: streamed versions in a spool folder, publishers' files by reference.

Filled by uploads (CreateVersion), checked when a version is sealed, read by fetches (Fetch).

`<spool>/<artifact_id>/` holds `manifest.json` and, for a streamed version, `payload`; for a delta also the chain of
versions below it (`deltas.chains`); for a version that is broadcast (nccl) the manifest alone. A chunk counts as
received only once its BLAKE3 was right, so a restarted hub finds out what it has by hashing the payload again. Every
read is checked against the manifest: bytes that changed at rest are never sent on.

Deletion belongs to the hub, since only it knows who may still fetch: it deletes its spool and, for versions made of
files, the publisher's files, provided that the manifest of the same artifact lies beside them.

Blocking: call it off the event loop. Safe for threads as long as no artifact is deleted while it is used.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loguru import logger

from meshrl.core.durable import is_full, write_at, write_file
from meshrl.versions.deltas import chains
from meshrl.versions.deltas.chains import MANIFEST, PAYLOAD
from meshrl.versions.transfer import chunk_of, sound_bytes
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.manifest import artifact_id as artifact_id_of
from meshrl.wire.manifest import digest
from meshrl.wire.manifest_file import PayloadReader, from_json, manifest_path, open_regular, to_json
from meshrl.wire.types import Chunk, ChunkEntry, FileEntry, Manifest, Transport, VersionKind

SPARE_BYTES = 2**20  # never used by versions: the log needs room to say what becomes of them
RECENT_CHUNKS = 6
VERIFIERS = 8  # threads that check a version made of files


@dataclass(kw_only=True)
class _Artifact:
    """One artifact: `received` has the indices of chunks whose digest was right."""

    manifest: Manifest
    folder: Path
    index_of: dict[int, int]
    received: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def files(self) -> Sequence[FileEntry]:
        if self.manifest.transport is Transport.FILESYSTEM:
            return self.manifest.files
        return (FileEntry(path=str(self.folder / PAYLOAD), offset=0, num_bytes=self.manifest.payload_bytes),)


class VersionStore:
    """Bytes of the versions that are not retired."""

    def __init__(self, spool_dir: Path) -> None:
        self._spool_dir = spool_dir
        self._artifacts: dict[str, _Artifact] = {}
        # Parts of the chains of deltas that were asked for: retired versions, and merged deltas, by artifact.
        self._parts: dict[str, _Artifact] = {}
        self._searched_parts = False  # for parts that an earlier start of the hub has named to engines
        self._damaged: set[str] = set()  # artifacts that changed at rest
        self._merging = threading.Lock()
        # Chunks that were read to send a part of: several connections ask for one between them.
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=RECENT_CHUNKS)

    def prepare(self, live: Collection[str]) -> None:
        """Loads the manifests of `live` artifacts from the spool and deletes whatever else is in it."""
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        for folder in self._spool_dir.iterdir():
            if not folder.is_dir():
                continue
            if folder.name not in live:
                shutil.rmtree(folder)
                continue
            try:
                manifest = from_json((folder / MANIFEST).read_bytes())
            except (OSError, ValueError) as error:  # engines that need it will be refused; the publisher can restage
                logger.error("manifest of artifact {} is lost: {}", folder.name, error)
                continue
            self._artifacts[folder.name] = self._artifact(manifest, folder)

    def _artifact(self, manifest: Manifest, folder: Path) -> _Artifact:
        index_of = {chunk.offset: index for index, chunk in enumerate(manifest.chunks)}
        artifact = _Artifact(manifest=manifest, folder=folder, index_of=index_of)
        if manifest.transport is Transport.STREAM and (folder / PAYLOAD).exists():
            with PayloadReader(artifact.files) as reader:
                chunks = enumerate(manifest.chunks)
                artifact.received = {index for index, chunk in chunks if _is_sound(reader, chunk)}
        return artifact

    def open(self, artifact_id: str, manifest: Manifest, *, with_base: bool = True) -> None:
        """Makes room for an artifact; does nothing when it is there already.

        `with_base`: a delta keeps its chain below it, as at a hub; a relay has the versions of a chain side by side.

        Raises OVERLOADED: there is no room; UNKNOWN_VERSION for a delta from a version that is not here, or not whole.
        """
        if artifact_id in self._artifacts:
            return
        folder = self._spool_dir / artifact_id
        with self._room_for(manifest):
            folder.mkdir(parents=True, exist_ok=True)
            if manifest.kind is VersionKind.DELTA and with_base:
                chains.link_base(self._base_of(manifest).folder, folder)
            write_file(folder / MANIFEST, to_json(manifest))
            if manifest.transport is Transport.STREAM:
                if shutil.disk_usage(folder).free < manifest.payload_bytes + SPARE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with (folder / PAYLOAD).open("ab") as payload:
                    payload.truncate(manifest.payload_bytes)
        self._artifacts[artifact_id] = self._artifact(manifest, folder)

    def check_base(self, artifact_id: str, manifest: Manifest) -> None:
        """Raises UNKNOWN_VERSION for a delta to come whose base is not here, not whole or not what it was."""
        if manifest.kind is VersionKind.DELTA and artifact_id not in self._artifacts:
            self._base_of(manifest)

    def _base_of(self, manifest: Manifest) -> _Artifact:
        """The base of a delta, whose own chain is whole."""
        for artifact_id, base in list(self._artifacts.items()):
            if base.manifest.result_root != manifest.base_root or base.manifest.version != manifest.base_version:
                continue
            try:
                sealed = base.manifest.transport is Transport.STREAM and not self.missing(artifact_id)
                chain = chains.chain_of(base.manifest, base.folder) if sealed else []
            except (OSError, ValueError) as error:  # retired meanwhile, or damaged
                logger.warning("the chain of version {} is gone: {!r}", base.manifest.version, error)
                continue
            if chain and not self._damaged.intersection(map(chains.id_of, chain)):
                return base
        raise chains.refuse_base(manifest)

    def steps(self, artifact_id: str, held_root: bytes, *, whole: bool) -> tuple[Manifest, ...]:
        """The manifests that an engine applies one after the other to reach a delta; all of them can be read then.

        It starts from weights with the root `held_root`, or without any. `whole`: all bytes of the delta are here.
        Raises UNKNOWN_VERSION when parts of the chain are gone.
        """
        artifact = self._get(artifact_id)
        with self._merging:  # deltas are merged once
            try:
                chain = chains.chain_of(artifact.manifest, artifact.folder)
                found = chains.steps_to(chain, held_root, whole=whole)
            except (OSError, ValueError) as error:
                text = f"the chain of version {artifact.manifest.version} is gone: {error}"
                raise MeshError(Reason.UNKNOWN_VERSION, text) from error
        for part in found:
            self._parts[chains.id_of(part)] = _Artifact(manifest=part.manifest, folder=part.folder, index_of={})
        return tuple(part.manifest for part in found)

    def part(self, artifact_id: str) -> Manifest | None:
        """The manifest of a part of some delta's chain; None for an artifact that is none."""
        if artifact_id not in self._parts and not self._searched_parts:  # of an earlier start
            self._searched_parts = True
            for folder, _, names in os.walk(self._spool_dir):  # a glob would end at a folder that is retired meanwhile
                path = Path(folder, MANIFEST)
                if MANIFEST not in names or len(path.relative_to(self._spool_dir).parts) < 3:  # not below another
                    continue
                with suppress(OSError, ValueError):  # damaged or being retired: it cannot be fetched
                    found = from_json(path.read_bytes())
                    self._parts[artifact_id_of(found)] = _Artifact(manifest=found, folder=path.parent, index_of={})
        part = self._parts.get(artifact_id)
        return None if part is None else part.manifest

    @contextmanager
    def _room_for(self, manifest: Manifest) -> Iterator[None]:
        """Turns the error of a full disk into one that tells the publisher what to do."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            raise MeshError(
                Reason.OVERLOADED,
                f"the hub has no room for version {manifest.version} in {self._spool_dir}: {error.strerror}; it has "
                f"{manifest.payload_bytes} bytes: free some space there, and send it again",
            ) from error

    def manifest(self, artifact_id: str) -> Manifest:
        return self._get(artifact_id).manifest

    def _get(self, artifact_id: str) -> _Artifact:
        artifact = self._artifacts.get(artifact_id) or self._parts.get(artifact_id)
        if artifact is None:
            raise MeshError(Reason.UNKNOWN_VERSION, f"artifact {artifact_id} is unknown or retired")
        return artifact

    def missing(self, artifact_id: str) -> tuple[int, ...]:
        """Returns the offsets of chunks that have not arrived; none for a version whose bytes come another way."""
        artifact = self._get(artifact_id)
        if artifact.manifest.transport is not Transport.STREAM:
            return ()
        with artifact.lock:
            chunks = artifact.manifest.chunks
            return tuple(chunk.offset for index, chunk in enumerate(chunks) if index not in artifact.received)

    def received_to(self, artifact_id: str, start: int, end: int) -> int:
        """Returns the end of the bytes that are here without a gap from `start` on, at most `end`; `start` if none."""
        artifact = self._get(artifact_id)
        chunks = artifact.manifest.chunks
        with artifact.lock:
            index = bisect_right(chunks, start, key=lambda chunk: chunk.offset) - 1
            while index < len(chunks) and chunks[index].offset < end and index in artifact.received:
                index += 1
        return end if index == len(chunks) else max(start, min(end, chunks[index].offset))

    def write(self, artifact_id: str, chunk: Chunk) -> None:
        """Takes one chunk.

        Raises INVALID_REQUEST, CHUNK_CORRUPT (its checksum), DIGEST_MISMATCH (the manifest's), OVERLOADED (no room).
        """
        artifact = self._get(artifact_id)
        index = artifact.index_of.get(chunk.offset)
        if index is None or len(chunk.data) != artifact.manifest.chunks[index].length:
            text = f"[{chunk.offset}, +{len(chunk.data)}) is not a chunk of the manifest"
            raise invalid([FieldViolation("chunk.offset", text)], "the upload")
        data = sound_bytes(chunk)
        if digest(data.data) != artifact.manifest.chunks[index].digest:
            raise MeshError(
                Reason.DIGEST_MISMATCH,
                f"chunk {chunk.offset} is not the one in the manifest; did the weights change meanwhile?",
            )
        with artifact.lock:
            if index in artifact.received:
                return
        with self._room_for(artifact.manifest):
            fd = os.open(artifact.folder / PAYLOAD, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_at(fd, data.data, chunk.offset)
            finally:
                os.close(fd)
        with artifact.lock:
            artifact.received.add(index)

    def verify(self, artifact_id: str, files: Literal["digests", "sizes"]) -> None:
        """Checks that an artifact is complete and, where that was not done on arrival, right.

        `files`: whether files are read and hashed, or only their sizes are looked at. Payloads are not synced to disk:
        what a power cut damages is found by the digests, and published again.

        Raises: CHUNKS_MISSING (a chunk, or a file that is missing or too short); DIGEST_MISMATCH.
        """
        artifact = self._get(artifact_id)
        if artifact.manifest.transport is Transport.STREAM:
            missing = self.missing(artifact_id)
            if missing:
                some = ", ".join(map(str, missing[:5]))
                raise MeshError(
                    Reason.CHUNKS_MISSING,
                    f"{len(missing)} of {len(artifact.manifest.chunks)} chunks are missing, at {some}; send them",
                )
            return
        if artifact.manifest.transport is Transport.NCCL:
            return  # no bytes here: engines check the digests of what they receive
        try:
            with PayloadReader(artifact.files) as reader:
                if files == "sizes":
                    return

                chunks = artifact.manifest.chunks
                with ThreadPoolExecutor(VERIFIERS) as threads:  # reading and hashing leave the interpreter to others
                    found = threads.map(lambda chunk: _is_sound(reader, chunk), chunks)
                    for chunk, sound in zip(chunks, found, strict=True):
                        if not sound:
                            raise _mismatch(artifact, chunk.offset)
        except OSError as error:
            raise MeshError(Reason.CHUNKS_MISSING, f"the hub cannot read a file of the version: {error}") from error

    def read(self, artifact_id: str, offset: int, end: int, chunk_bytes: int) -> Iterator[Chunk]:
        """Yields [offset, end) in pieces of at most `chunk_bytes`, none of them across chunks of the manifest.

        Raises: UNKNOWN_VERSION when the bytes are gone; DIGEST_MISMATCH when they changed at rest; NOT_SUPPORTED for a
        version whose bytes never come here.
        """
        artifact = self._get(artifact_id)
        if artifact.manifest.transport is Transport.NCCL:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                f"version {artifact.manifest.version} travels in a group (transport nccl), the hub has no bytes of it; "
                "join the publisher's next group, or publish with transport stream or filesystem",
            )
        try:
            with PayloadReader(artifact.files) as reader:
                for chunk in artifact.manifest.chunks:
                    if chunk.offset + chunk.length <= offset or chunk.offset >= end:
                        continue
                    in_part = chunk.offset < offset or chunk.offset + chunk.length > end
                    data = dict(self._recent.copy()).get(chunk.digest) if in_part else None
                    if data is None:
                        data = reader.read(chunk.offset, chunk.length)
                        if digest(data) != chunk.digest:
                            self._damaged.add(artifact_id)
                            raise _mismatch(artifact, chunk.offset)
                        if in_part:
                            self._recent.append((chunk.digest, data))
                    first, last = max(offset, chunk.offset), min(end, chunk.offset + chunk.length)
                    for at in range(first, last, chunk_bytes):
                        stop = min(at + chunk_bytes, last)
                        yield chunk_of(at, data[at - chunk.offset : stop - chunk.offset])
        except OSError as error:
            raise MeshError(Reason.UNKNOWN_VERSION, f"bytes of artifact {artifact_id} are gone: {error}") from error

    def delete(self, artifact_id: str, paths: Sequence[str]) -> None:
        """Deletes the spool of an artifact and those of its publisher's files that may go. Errors are logged."""
        self._artifacts.pop(artifact_id, None)
        folder = self._spool_dir / artifact_id
        self._parts = {name: part for name, part in self._parts.items() if not part.folder.is_relative_to(folder)}
        shutil.rmtree(folder, ignore_errors=True)
        payloads: dict[Path, list[Path]] = {}
        for path in map(Path, paths):
            payloads.setdefault(manifest_path(path), []).append(path)
        for manifest_file, of_one in payloads.items():
            try:
                with open(open_regular(manifest_file), "rb") as file:
                    manifest = from_json(file.read())
                if artifact_id_of(manifest) != artifact_id:
                    logger.warning("{} are kept: the manifest beside them is of another artifact", of_one)
                    continue
                for path in (*of_one, manifest_file):
                    path.unlink(missing_ok=True)
                folder_of_step = manifest_file.parent
                if folder_of_step.name.startswith("step_") and not any(folder_of_step.iterdir()):
                    folder_of_step.rmdir()
            except (OSError, ValueError) as error:  # the version is retired all the same; only disk space is lost
                logger.warning("{} are kept: {}", of_one, error)


def _is_sound(reader: PayloadReader, chunk: ChunkEntry) -> bool:
    """Whether the bytes of a chunk are those of the manifest."""
    return digest(reader.read(chunk.offset, chunk.length)) == chunk.digest


def _mismatch(artifact: _Artifact, offset: int) -> MeshError:
    version = artifact.manifest.version
    return MeshError(
        Reason.DIGEST_MISMATCH,
        f"version {version} changed at rest: the chunk at byte {offset} no longer matches its BLAKE3; publish it again "
        "under a new artifact or go on with the next version",
    )
