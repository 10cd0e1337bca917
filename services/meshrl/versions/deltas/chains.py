"""The chain of versions below a delta, in the hub's spool, and the deltas merged from it.

A delta's chain goes down to a full version, the anchor. The folder of a delta has its base in `base`, as hard links to
the base's own files, and that one's base in `base/base`. So an engine that may fetch a version can fetch its whole
chain, even where parts of it are retired, and a file is gone once no version needs it. An anchor that came by files has
its bytes in those. `joined/ROOT` holds the deltas merged into one, for engines that still have the weights of ROOT.

Blocking: call it off the event loop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from loguru import logger

from meshrl.core.durable import write_file
from meshrl.versions.deltas.codec import DeltaError, merge
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import artifact_id, chunks_of, delta_manifest
from meshrl.wire.manifest_file import from_json, to_json
from meshrl.wire.types import Manifest, VersionKind

MANIFEST, PAYLOAD = "manifest.json", "payload"
_BASE, _JOINED = "base", "joined"

Chain = Mapping[str, VersionBytes]
"""By artifact, the anchor first."""


def link_base(base: Chain, folder: Path) -> Chain:
    """Links a chain into `folder`, for a delta from its last version. Raises OSError."""
    target, making = folder / _BASE, folder / f"{_BASE}.making"
    if not target.exists():
        shutil.rmtree(making, ignore_errors=True)
        into = making
        for part in reversed(base.values()):
            into.mkdir(parents=True)
            for name in (MANIFEST, PAYLOAD):
                if not (part.folder / name).exists():
                    continue  # the payload is in files of the publisher's
                try:
                    os.link(part.folder / name, into / name)
                except OSError:  # a file system without links
                    shutil.copyfile(part.folder / name, into / name)
            into = into / _BASE
        making.rename(target)
    linked: dict[str, VersionBytes] = {}
    for artifact, part in reversed(base.items()):
        linked[artifact] = stored(part.manifest, target)
        target = target / _BASE
    return dict(reversed(linked.items()))


def files_below(folder: Path) -> dict[str, list[Path]]:
    """The publisher's files of the anchor below the delta in `folder`, if any, by its artifact."""
    anchor = folder
    while (anchor / _BASE).exists():
        anchor = anchor / _BASE
    if anchor == folder or (anchor / PAYLOAD).exists():
        return {}
    try:
        manifest = from_json((anchor / MANIFEST).read_bytes())
    except (OSError, ValueError):  # damaged, or being deleted
        return {}
    return {artifact_id(manifest): [Path(file.path) for file in manifest.files]}


def chain_of(manifest: Manifest, folder: Path) -> Chain:
    """The chain of the version in `folder`, itself last. Raises OSError; ValueError if damaged."""
    chain = [stored(manifest, folder)]
    while chain[0].manifest.kind is VersionKind.DELTA:
        below = chain[0].folder / _BASE
        part = stored(from_json((below / MANIFEST).read_bytes()), below)
        if part.manifest.result_root != chain[0].manifest.base_root:
            raise ValueError(f"the base of version {chain[0].manifest.version} is another one")
        chain.insert(0, part)
    return {artifact_id(part.manifest): part for part in chain}


def steps_to(chain: Sequence[VersionBytes], held_root: bytes, *, whole: bool) -> list[VersionBytes]:
    """The steps of fewest bytes by which an engine reaches the last version of a chain.

    It starts from weights with the root `held_root` where the chain has them, else from the anchor. `whole`: all bytes
    of the last delta are here, so that it can be merged with those before.
    """
    roots = [part.manifest.result_root for part in chain]
    if held_root and held_root in roots:
        held = len(roots) - 1 - roots[::-1].index(held_root)
        return _cheapest(chain, held, whole=whole)
    return [chain[0], *_cheapest(chain, 0, whole=whole)]


def _cheapest(chain: Sequence[VersionBytes], held: int, *, whole: bool) -> list[VersionBytes]:
    rest = [] if whole else [chain[-1]]
    deltas = list(chain[held + 1 : len(chain) - len(rest)])
    if len(deltas) > 1:
        try:
            merged = _merged(chain[held].manifest, deltas)
        except (OSError, DeltaError, MeshError) as error:  # a full disk, or bytes that changed at rest
            logger.warning("deltas to version {} are sent one by one: {!r}", deltas[-1].manifest.version, error)
        else:
            if merged.manifest.payload_bytes < sum(part.manifest.payload_bytes for part in deltas):
                deltas = [merged]
    return [*deltas, *rest]


def _merged(base: Manifest, deltas: Sequence[VersionBytes]) -> VersionBytes:
    last = deltas[-1]
    folder = last.folder / _JOINED / base.result_root.hex()
    try:
        return stored(from_json((folder / MANIFEST).read_bytes()), folder)
    except (FileNotFoundError, ValueError):
        pass
    sizes = [part.manifest.payload_bytes for part in deltas]
    read = (part.read(0, size, size) for part, size in zip(deltas, sizes, strict=True))
    stream = merge([np.frombuffer(b"".join(chunk.data for chunk in chunks), dtype=np.uint8) for chunks in read])
    chunk_bytes = max(chunk.length for part in deltas for chunk in part.manifest.chunks)
    manifest = delta_manifest(base, last.manifest, chunks_of(stream.data, max(chunk_bytes, 2**20)))
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / PAYLOAD, stream.tobytes())
    write_file(folder / MANIFEST, to_json(manifest))  # last: then all of it is there
    return stored(manifest, folder)


def stored(manifest: Manifest, folder: Path) -> VersionBytes:
    part = VersionBytes(manifest, file=folder / PAYLOAD)
    part.missing.clear()
    return part
