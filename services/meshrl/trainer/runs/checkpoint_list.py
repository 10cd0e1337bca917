"""The checkpoints of a run for ListCheckpoints: those on disk, and requested ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meshrl.training.checkpoints.checkpointer import PART
from meshrl.wire.errors import MeshError
from meshrl.wire.saved_steps import step_folder, steps_in
from meshrl.wire.types import Checkpoint, CheckpointState

KEPT = 256
COARSE_S = 0.05  # a file's time may lie so far before the clock's


class CheckpointList:
    """`folder` holds the checkpoints that the run may resume from."""

    def __init__(self, run_id: str, folder: Path) -> None:
        self._run_id, self._folder = run_id, folder
        self._asked: OrderedDict[str, Checkpoint] = OrderedDict()  # by request id

    def asked(self, request_id: str, *, name: str, step: int, weights_only: bool) -> Checkpoint:
        """A new request, or one that failed, is SAVING from here on."""
        known = self._asked.get(request_id)
        if known is not None and known.state is not CheckpointState.FAILED:
            return known
        self._asked[request_id] = found = Checkpoint(
            run_id=self._run_id,
            step=step,
            state=CheckpointState.SAVING,
            weights_only=weights_only,
            name=name,
            request_id=request_id,
            create_time=time.time(),
        )
        while len(self._asked) > KEPT:
            self._asked.popitem(last=False)
        return found

    async def follow(self, request_id: str, save: Callable[[], Awaitable[tuple[int, Path]]]) -> Checkpoint:
        """Runs the save of a request that is SAVING. Raises its error, and lists it as FAILED."""
        asked = self._asked[request_id]
        try:
            step, path = await save()
        except MeshError as error:
            failed = replace(
                asked,
                state=CheckpointState.FAILED,
                end_time=time.time(),
                reason=error.reason.name,
                message=error.message,
            )
            self._asked[request_id] = failed
            raise
        done = replace(asked, state=CheckpointState.DURABLE, step=step, path=str(path), end_time=time.time())
        self._asked[request_id] = done
        return done

    def listed(self) -> list[Checkpoint]:
        """Newest step first. Reads the disk."""
        asked = self._asked.values()
        found = [checkpoint for checkpoint in asked if not checkpoint.path]
        saving_since = min((_begun(one) for one in found if one.state is CheckpointState.SAVING), default=float("inf"))
        for step in steps_in(self._folder, PART):
            folder = step_folder(self._folder, step)
            known = [one for one in asked if one.path == str(folder / PART)]  # of each request that came at this step
            with suppress(FileNotFoundError):  # it is deleted at this moment
                if not known and (folder / PART).stat().st_mtime >= saving_since - COARSE_S:
                    continue  # its request, which is listed, has yet to learn of it
                made_by_itself = Checkpoint(
                    run_id=self._run_id, step=step, state=CheckpointState.DURABLE, path=str(folder)
                )
                found += [_on_disk(one, folder) for one in known or [made_by_itself]]
        found += (one for one in asked if one.weights_only and one.path and Path(one.path).exists())
        return sorted(found, key=lambda checkpoint: (checkpoint.step, _begun(checkpoint)), reverse=True)


def _begun(checkpoint: Checkpoint) -> float:
    return checkpoint.create_time or 0.0


def _on_disk(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    ended = max((one.st_mtime for one in files), default=None)
    return replace(checkpoint, num_bytes=sum(one.st_size for one in files), end_time=checkpoint.end_time or ended)


def key_of(checkpoint: Checkpoint) -> str:
    return checkpoint.request_id or f"{checkpoint.step}/{checkpoint.weights_only:d}"
