"""What leads to a version that is a delta, at a hub: the versions below it, down to a full one, and joined deltas.

A delta's folder has its base in `base`, as links to the base's own files, and that one's base in `base/base`, down to
the full version at the bottom, the anchor. So a version that may be fetched has all that leads to it, whatever was
retired, and what no version needs any more is gone with the last link. Beside lie deltas joined for engines that missed
versions, by the root that they lead from.

Blocking: call it off the event loop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.durable import write_file
from meshrl.versions.deltas.codec import DeltaError, squash
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, chunks_of, delta_manifest, digest
from meshrl.wire.manifest_file import from_json, to_json
from meshrl.wire.types import FileEntry, Manifest, VersionKind

MANIFEST, PAYLOAD = "manifest.json", "payload"
_BASE, _JOINED = "base", "joined"


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """A manifest and its payload, whole, in a folder of the spool."""

    manifest: Manifest
    folder: Path

    @property
    def files(self) -> tuple[FileEntry, ...]:
        path = str(self.folder / PAYLOAD)
        return (FileEntry(path=path, offset=0, num_bytes=self.manifest.payload_bytes),)


def link_base(base: Path, folder: Path) -> None:
    """Puts a sealed version, with all that it leads from, below a delta to come in `folder`. Raises OSError."""
    target = folder / _BASE
    if target.exists():
        return
    making = folder / f"{_BASE}.making"
    shutil.rmtree(making, ignore_errors=True)
    below, into = base, making
    while below.exists():
        into.mkdir(parents=True)
        for name in (MANIFEST, PAYLOAD):
            _link(below / name, into / name)
        below, into = below / _BASE, into / _BASE
    making.rename(target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def chain_of(manifest: Manifest, folder: Path) -> list[StoredPart]:
    """A version in `folder` and what it leads from, the anchor first. Raises OSError; ValueError for a damaged one."""
    chain = [StoredPart(manifest=manifest, folder=folder)]
    while chain[0].manifest.kind is VersionKind.DELTA:
        below = chain[0].folder / _BASE
        part = StoredPart(manifest=from_json((below / MANIFEST).read_bytes()), folder=below)
        if part.manifest.result_root != chain[0].manifest.base_root:
            raise ValueError(f"the base of version {chain[0].manifest.version} is another one")
        chain.insert(0, part)
    return chain


def steps_to(chain: Sequence[StoredPart], held_root: bytes, *, whole: bool) -> list[StoredPart]:
    """What to apply in order to come to the last version of a chain, in as few bytes as there are.

    From weights with the root `held_root` where the chain has it, else from the anchor. `whole`: the last delta is all
    here, so that it can be joined with those before.
    """
    roots = [part.manifest.result_root for part in chain]
    if held_root and held_root in roots:
        held = len(roots) - 1 - roots[::-1].index(held_root)
        return _fewest(chain, held, whole=whole)
    return [chain[0], *_fewest(chain, 0, whole=whole)]


def _fewest(chain: Sequence[StoredPart], held: int, *, whole: bool) -> list[StoredPart]:
    """The deltas after chain[held], or one that they are joined to where that has fewer bytes."""
    rest = [] if whole else [chain[-1]]
    deltas = list(chain[held + 1 : len(chain) - len(rest)])
    if len(deltas) > 1:
        try:
            joined = _joined(chain[held].manifest, deltas)
        except (OSError, DeltaError) as error:  # a full disk, or bytes that changed at rest: an agent will find out
            logger.warning("deltas to version {} are sent one by one: {!r}", deltas[-1].manifest.version, error)
        else:
            if joined.manifest.payload_bytes < sum(part.manifest.payload_bytes for part in deltas):
                deltas = [joined]
    return [*deltas, *rest]


def _joined(base: Manifest, deltas: Sequence[StoredPart]) -> StoredPart:
    """The deltas joined to one, made once."""
    last = deltas[-1]
    folder = last.folder / _JOINED / base.result_root.hex()
    try:
        return StoredPart(manifest=from_json((folder / MANIFEST).read_bytes()), folder=folder)
    except (FileNotFoundError, ValueError):
        pass
    stream = squash([read_payload(part) for part in deltas])
    chunk_bytes = max(chunk.length for part in deltas for chunk in part.manifest.chunks)
    manifest = delta_manifest(base, last.manifest, chunks_of(stream.data, max(chunk_bytes, 2**20)))
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / PAYLOAD, stream.tobytes())
    write_file(folder / MANIFEST, to_json(manifest))  # last: then all of it is there
    return StoredPart(manifest=manifest, folder=folder)


def read_payload(part: StoredPart) -> NDArray[np.uint8]:
    """The bytes of a delta. Raises DeltaError for bytes that are not those of its manifest."""
    data = (part.folder / PAYLOAD).read_bytes()
    for chunk in part.manifest.chunks:
        if digest(memoryview(data)[chunk.offset : chunk.offset + chunk.length]) != chunk.digest:
            raise DeltaError(f"the chunk at {chunk.offset} of version {part.manifest.version} changed at rest")
    return np.frombuffer(data, dtype=np.uint8)


def refuse_base(manifest: Manifest) -> MeshError:
    """What a publisher is told whose delta leads from weights that are not here."""
    text = f"version {manifest.version} is a delta from version {manifest.base_version}, which is not at this hub"
    return MeshError(Reason.UNKNOWN_VERSION, f"{text}; send the version in full")


def id_of(part: StoredPart) -> str:
    """The artifact id of a part."""
    return artifact_id(part.manifest)
