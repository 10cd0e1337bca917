"""The steps by which an engine reaches a delta, and the deltas that are merged for them in the hub's spool.

A delta's chain goes down to a full version, the anchor. In the folder of a delta `joined/ROOT` holds the deltas merged
into one, for engines that still have the weights of ROOT.

Blocking: call it off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from loguru import logger

from meshrl.core.durable import write_file
from meshrl.versions.deltas.codec import DeltaError, merge
from meshrl.versions.version_bytes import PAYLOAD, VersionBytes
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import chunks_of, delta_manifest
from meshrl.wire.manifest_file import from_json, to_json
from meshrl.wire.types import Manifest

MANIFEST = "manifest.json"
JOINED = "joined"


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
    folder = last.folder / JOINED / base.result_root.hex()
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
    part = VersionBytes(manifest, folder=folder)
    part.missing.clear()
    return part
