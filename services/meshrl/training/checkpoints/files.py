"""Folders that appear on disk whole or not at all, each with a manifest.

A folder is written as `NAME.partial`, flushed, and renamed; it is deleted by way of `NAME.deleted`. The next start
deletes leftovers of both.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.core.durable import flush, json_checksum, write_file
from meshrl.wire.saved_steps import step_folder, steps_in

MANIFEST = "checkpoint.json"
CHECKSUM = "crc32"  # its key in the manifest, over all other keys
FORMAT = "meshrl-checkpoint-1"
PARTIAL, DELETED, SUPERSEDED = ".partial", ".deleted", "superseded_"
_BLOCK_BYTES = 2**24


class CheckpointError(Exception):
    """A checkpoint could not be written, found or read; the message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class FileMark:
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """A checkpoint's manifest; the last file that is written into it."""

    step: int
    ranks: int
    model: str  # class of the model
    optimizer: str  # class of the optimizer
    tokens: int  # trained up to the step
    samples: int
    files: Mapping[str, FileMark]
    data: Mapping[str, object] = field(default_factory=dict)  # where the data goes on, of a loop that has its own

    def write(self, folder: Path) -> None:
        values = {"format": FORMAT, **asdict(self)}
        write_file(folder / MANIFEST, json.dumps({**values, CHECKSUM: json_checksum(values)}, indent=1))

    @classmethod
    def read(cls, folder: Path, *, step: int) -> CheckpointContents:
        """`step` is the one in the folder's name. Manifests older than checksums are read without that check.

        Raises CheckpointError for a folder that this program did not write, or that is damaged or of another step.
        """
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} has no {MANIFEST}, so it is not a checkpoint of this program; delete it, or resume another "
                "step with ckpt.resume_step"
            ) from error
        except (OSError, ValueError) as error:
            raise damaged(folder, f"{MANIFEST} cannot be read ({error})") from error
        try:
            values = json.loads(text)
            written_as, checksum = values.get("format"), values.pop(CHECKSUM, None)
            if written_as == FORMAT and checksum is not None and checksum != json_checksum(values):
                raise damaged(folder, f"{MANIFEST} does not have the checksum it was written with")
            if written_as == FORMAT:
                del values["format"]
                files = {name: FileMark(**mark) for name, mark in values.pop("files").items()}
                manifest = cls(files=files, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(folder, f"{MANIFEST} cannot be read ({error})") from error
        if written_as != FORMAT:
            raise CheckpointError(
                f"{folder} was written in format {written_as!r}, this program reads {FORMAT!r}; resume it with the "
                "version that wrote it, or start from its snapshot under weights/"
            )
        if manifest.step != step:
            raise CheckpointError(
                f"{folder} holds the checkpoint of step {manifest.step}, not of step {step}; give its folder the name "
                f"step_{manifest.step} back, or resume another step with ckpt.resume_step"
            )
        return manifest


def damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is damaged: {what}; delete it and resume an earlier step (ckpt.resume_step), or -1 for the newest"
    )


def mark(path: Path) -> FileMark:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return FileMark(num_bytes=size, crc32=checksum)


def verify(folder: Path, files: Iterable[tuple[str, FileMark]]) -> None:
    """Raises CheckpointError unless the files are as they were written."""
    for name, wanted in files:
        try:
            found = mark(folder / name)
        except OSError as error:
            raise damaged(folder, f"{name} cannot be read ({error})") from error
        if found.num_bytes != wanted.num_bytes:
            raise damaged(folder, f"{name} has {found.num_bytes} bytes instead of {wanted.num_bytes}")
        if found != wanted:
            raise damaged(folder, f"{name} does not have the checksum it was written with")


def make_partial(folder: Path) -> Path:
    """An empty folder to write before it becomes `folder`."""
    partial = folder.with_name(folder.name + PARTIAL)
    _remove_tree(partial)
    missing = [parent for parent in partial.parents if not parent.exists()]
    partial.mkdir(parents=True)
    for parent in missing:
        flush(parent.parent)
    return partial


def reveal(folder: Path) -> None:
    """Gives a flushed partial folder its name, in place of an older one; on disk on return."""
    if folder.exists():
        _set_aside_to_delete(folder)
    folder.with_name(folder.name + PARTIAL).rename(folder)
    flush(folder.parent)
    _remove_tree(folder.with_name(folder.name + DELETED))


def remove(folder: Path) -> None:
    if folder.is_dir():
        _set_aside_to_delete(folder)
        flush(folder.parent)
        _remove_tree(folder.with_name(folder.name + DELETED))


def discard_partial(folder: Path) -> None:
    _remove_tree(folder.with_name(folder.name + PARTIAL))


def supersede(folder: Path) -> Path:
    """Renames a folder so that it is not the newest step. Returns its new path."""
    aside = folder.with_name(SUPERSEDED + folder.name)  # nobody who looks for steps finds it
    _remove_tree(aside)
    folder.rename(aside)
    flush(folder.parent)
    return aside


def sweep(root: Path, part: str | None) -> None:
    """Deletes leftovers among the steps under `root`, and among their parts of that name."""
    for step in steps_in(root):
        folder = step_folder(root, step)
        leftovers = [folder / (part + suffix) for suffix in (PARTIAL, DELETED)] if part is not None else []
        for leftover in leftovers:
            if leftover.is_dir():
                _remove_tree(leftover)
                with suppress(OSError):  # other programs keep their part of the step here
                    folder.rmdir()
    for suffix in (PARTIAL, DELETED):
        for leftover in root.glob(f"step_*{suffix}"):
            _remove_tree(leftover)


def surplus(
    steps: Iterable[int], *, keep_last: int | None, keep_interval: int | None, pinned: Container[int]
) -> set[int]:
    """The steps to delete: all but the newest `keep_last`, multiples of `keep_interval` and pinned ones. None is no
    limit."""
    if keep_last is None:
        return set()
    older = (step for step in sorted(steps)[:-keep_last] if step not in pinned)
    return {step for step in older if keep_interval is None or step % keep_interval}


def _set_aside_to_delete(folder: Path) -> None:
    doomed = folder.with_name(folder.name + DELETED)
    _remove_tree(doomed)
    folder.rename(doomed)


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
