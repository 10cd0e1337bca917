"""Code that engines compiled at their start, kept in the hub's spool by key for engines that start later."""

from __future__ import annotations

import threading
from pathlib import Path

from loguru import logger

from meshrl.core.durable import write_file
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import DIGEST_BYTES, digest

MOST_KEPT = 8


class CompiledStore:
    """Archives of at most MOST_KEPT keys, the newest. Blocking: call it off the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = threading.Lock()

    def keep(self, key: str, archive_digest: bytes, archive: bytes) -> None:
        """Raises DIGEST_MISMATCH for an archive that was damaged on the way, OVERLOADED without room."""
        if digest(archive) != archive_digest:
            raise MeshError(Reason.DIGEST_MISMATCH, "the archive of what was compiled is not what its digest names")
        try:
            with self._writing:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_file(self._folder / key, archive_digest + archive)
                kept = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
                for file in kept[:-MOST_KEPT]:
                    file.unlink()
        except OSError as error:
            raise MeshError(Reason.OVERLOADED, f"what was compiled is not kept: {error}") from error

    def get(self, key: str) -> tuple[bytes, bytes]:
        """The digest and the archive; both empty if none is kept, or it was damaged."""
        try:
            content = (self._folder / key).read_bytes()
        except OSError:
            return b"", b""
        archive_digest, archive = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest(archive) != archive_digest:
            logger.warning("{} was damaged at rest; it is kept no more", self._folder / key)
            (self._folder / key).unlink(missing_ok=True)
            return b"", b""
        return archive_digest, archive
