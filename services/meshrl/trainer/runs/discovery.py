"""Finds the runs that have a folder: <output_dir>/run_*/control/orch.toml, the configuration of a run's orchestrator.

    run_NAME/control/orch.toml                      read: model.lora, optim, scheduler, loss, ckpt and some values
    run_NAME/control/config_validation_error.txt    written: why the run is not taken up
    run_NAME/control/evicted.txt                    written: why the trainer suspended it; deleted, it goes on

A run is created once its file is valid and there is a place, and deleted once its file or folder is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic import ValidationError

from meshrl.core.durable import write_file
from meshrl.core.paths import INVALID, ORCH_TOML, Layout
from meshrl.trainer.runs.hooks import RunHooks
from meshrl.trainer.runs.host import RunHost
from meshrl.trainer.runs.settings import RunSettings
from meshrl.wire.errors import MeshError, Reason

PATTERN = "run_*"
EVICTED = "evicted.txt"
EVERY_S = 1.0
SECTIONS = ("optim", "scheduler", "loss", "ckpt")
VALUES = ("max_steps", "seed", "share")
FULL = (Reason.RUN_LIMIT_REACHED, Reason.NO_ROOM_FOR_RUN)


@dataclass
class _Seen:
    refused: bytes | None = None  # its file, if that was refused as it is
    waits: bool = False  # for a place, of which the log has a line
    discovered: bool = False  # its hooks were called
    evicted: bool = False  # EVICTED is written


class Discovery:
    """Its runs are those of the host whose name is that of a folder."""

    def __init__(self, host: RunHost, hooks: RunHooks, output_dir: Path) -> None:
        self._host, self._hooks, self._output_dir = host, hooks, output_dir
        self._seen: defaultdict[str, _Seen] = defaultdict(_Seen)

    async def follow(self, every_s: float = EVERY_S) -> None:
        while True:
            try:
                await self.look()
            except (OSError, MeshError) as error:  # a folder that goes while it is read, a disk that is full
                logger.warning("the folders of runs could not be followed: {}", error)
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Looks once."""
        found = await asyncio.to_thread(self._files)
        for run_id in [run_id for run_id in self._host.added if run_id.startswith(PATTERN[:-1])]:
            if run_id not in found:
                index = self._hooks.index(run_id)
                await self._host.delete(run_id, keep_checkpoints=True)
                self._hooks.forgotten(index, run_id)
                self._seen.pop(run_id, None)
        for run_id, data in sorted(found.items()):
            seen = self._seen[run_id]
            if run_id not in self._host.added and seen.refused != data:
                await self._take_up(run_id, data)
            if run_id in self._host.added:
                if not seen.discovered:
                    seen.discovered = True
                    self._hooks.discovered(run_id, tomllib.loads(data.decode()))
                await self._evictions(run_id)

    def _files(self) -> dict[str, bytes]:
        found = {}
        for file in self._output_dir.glob(str(Layout(Path(PATTERN)).control / ORCH_TOML)):
            try:
                found[file.parents[1].name] = file.read_bytes()
            except FileNotFoundError:
                continue
        return found

    async def _take_up(self, run_id: str, data: bytes) -> None:
        problem, seen = Layout(self._output_dir / run_id).control / INVALID, self._seen[run_id]
        try:
            table = tomllib.loads(data.decode())
            settings = settings_from(table, self._host.own_settings, folder=run_id)
            if (refusal := self._hooks.problem(table)) is not None:
                raise ValueError(refusal)
            digest = hashlib.sha256(data).hexdigest()
            await self._host.create(run_id, settings, request_id=f"{run_id}/{ORCH_TOML} {digest}")
        except (ValueError, MeshError) as error:  # tomllib's and pydantic's are ValueErrors
            if isinstance(error, MeshError) and error.reason in FULL:
                if not seen.waits:
                    logger.warning("run {!r} waits for a place: {}", run_id, error)
                seen.waits = True
                return
            text = explained(error)
            logger.error("run {!r} is not taken up: {}", run_id, text)
            seen.refused = data
            await asyncio.to_thread(write_file, problem, f"{text}\n".encode())
            return
        seen.waits, seen.refused = False, None
        await asyncio.to_thread(problem.unlink, missing_ok=True)

    async def _evictions(self, run_id: str) -> None:
        suspension, seen = self._host.suspension(run_id), self._seen[run_id]
        file = Layout(self._output_dir / run_id).control / EVICTED
        if suspension is None or not suspension.reason:
            if seen.evicted:
                await asyncio.to_thread(file.unlink, missing_ok=True)
            seen.evicted = False
        elif not seen.evicted:
            await asyncio.to_thread(write_file, file, f"{suspension.message}\n".encode())
            seen.evicted = True
        elif not await asyncio.to_thread(file.exists):
            await self._host.resume(run_id)
            seen.evicted = False


def settings_from(table: Mapping[str, Any], own: RunSettings, *, folder: str) -> RunSettings:
    """By the orchestrator's configuration, the rest as in the trainer's own run. Raises ValueError, which
    names the key."""
    values = own.model_dump(exclude={"ckpt": {"resume_step"}}) | {"folder": folder}
    adapter = {key: value for key, value in table.get("model", {}).get("lora", {}).items() if key != "name"}
    values["lora"] = (values["lora"] or {}) | adapter
    for section in SECTIONS:
        given = table.get(section)
        if section == "loss" and given:
            values[section] = given
        elif given:
            values[section] = (values[section] or {}) | given
    values |= {key: table[key] for key in VALUES if key in table}
    values["adapter_seed"] = values["seed"]
    made = RunSettings.model_validate(values)
    if made.ckpt is not None and made.ckpt.resume_step not in (None, -1):
        raise ValueError(
            f"ckpt.resume_step is {made.ckpt.resume_step}, but a run goes on from its newest checkpoint; set it to -1,"
            " or leave it out"
        )
    made.scheduler.check_horizon(made.max_steps)
    for typed in (made.optim, made.scheduler):
        typed.refuse_foreign(table.get(typed.section, {}))
    return made


def explained(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "\n".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return str(error)
