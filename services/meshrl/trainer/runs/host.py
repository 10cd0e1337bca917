"""The runs beside a trainer's own: made, suspended, deleted, and brought back after a restart.

On the event loop of rank 0; the training thread does all work on the model. <output_dir>/runs/index.json lists them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic import BaseModel

from meshrl.core.config import ConfigError
from meshrl.core.durable import write_file
from meshrl.core.paths import Layout
from meshrl.trainer.loop import TrainerLoop
from meshrl.trainer.opening import OpenRun
from meshrl.trainer.publishing.publisher import next_epoch
from meshrl.trainer.ranks.commands import CommandSender, CreateCommand, DeleteCommand
from meshrl.trainer.ranks.rank_runs import RankRun, RunMaker
from meshrl.trainer.runs.settings import RunSettings, StartFrom
from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.training.checkpoints.checkpointer import PART
from meshrl.training.model_config import LoraConfig
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.saved_steps import steps_in
from meshrl.wire.types import RunInfo, RunPhase, RunSpec, StartPoint, Suspension

INDEX = "index.json"
EPOCH = "epoch"
CLOSE_S = 10.0


class _Row(BaseModel):
    run_id: str
    settings: RunSettings
    create_time: float
    request_id: str = ""  # of the CreateRun that made it
    account: str = ""  # the token whose bearer made it
    suspension: Suspension | None = None


@dataclass(kw_only=True, eq=False)
class _Added:
    row: _Row
    queue: TrainingQueue
    rank_run: RankRun
    run: OpenRun
    opening: asyncio.Task[None] | None = None


class RunHost:
    def __init__(
        self,
        table: RunTable,
        loop: TrainerLoop,
        maker: RunMaker,
        commands: CommandSender,
        own: RankRun,
        settings: RunSettings,
        *,
        max_runs: int,
        room_bytes: int | None,
        history_events: int,
        open_run: Callable[[RankRun, TrainingQueue, RunSettings, int], OpenRun],
    ) -> None:
        """`settings` are the own run's, `max_runs` the most that are added, `room_bytes` those of their adapters (None:
        not known). `open_run` prepares a run's publication and training in an epoch, on the training thread."""
        self._table, self._loop, self._maker, self._commands = table, loop, maker, commands
        self._own, self.own_settings = own, settings
        self.max_runs, self.room_bytes = max_runs, room_bytes
        self._history_events = history_events
        self._open_run = open_run
        self._added: dict[str, _Added] = {}
        self._making: set[str] = set()
        self._index = maker.runs_folder / INDEX
        self._index_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def used_bytes(self) -> int:
        """Of the adapters of added runs on each rank, with gradients and optimizers."""
        return sum(added.queue.book.adapter_bytes for added in self._added.values())

    def info(self, queue: TrainingQueue) -> RunInfo:
        queue.book.used_share = self._loop.scheduler.used_share(queue.book.run_id)
        return queue.book.info()

    @property
    def added(self) -> Sequence[str]:
        return tuple(self._added)

    def suspension(self, run_id: str) -> Suspension | None:
        return self._table.find(run_id).book.suspension

    def settings_of(self, run_id: str, spec: RunSpec | None) -> RunSettings:
        """Raises MeshError as RunSettings.from_spec."""
        start = None if spec is None or spec.start_from is None else self._start(run_id, spec.start_from)
        return RunSettings.from_spec(spec, self.own_settings, start)

    def _start(self, run_id: str, point: StartPoint) -> tuple[StartFrom, LoraConfig | None] | None:
        """With the adapter of its run; None for a point in the new run's own folder."""
        source, added = point.run_id or run_id, self._added.get(point.run_id)
        of_own = source == self._own.state.run_id
        settings = self.own_settings if of_own else None if added is None else added.row.settings
        folder = self._maker.output_dir if of_own else self._maker.folder(source, settings)
        checkpoints = Layout(folder).checkpoints
        steps = steps_in(checkpoints, PART)
        step = point.step if point.step is not None else max(steps, default=None)
        if source == run_id and step == max(steps, default=None):
            return None
        known = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        problem = f"run {source!r} has {known}"
        if source == run_id:
            problem += " and goes on from the newest; leave spec.start_from.step out, or give the new run another name"
        elif step not in steps:
            problem += f"; save one with `meshrl run checkpoint {source}`, or name another step"
        else:
            start = StartFrom(
                run_id=source,
                step=step,
                with_optimizer=point.with_optimizer,
                checkpoints=str(checkpoints.absolute()),
            )
            return start, None if settings is None else settings.lora
        raise invalid([FieldViolation("spec.start_from", problem)], "the new run")

    # --- what clients ask -------------------------------------------------------------------------

    async def create(
        self, run_id: str, settings: RunSettings, *, request_id: str = "", account: str = "", most: int | None = None
    ) -> RunInfo:
        """Adds a run, which goes on from the newest checkpoint of its folder, if any.

        Returns once its adapter is there. A request that made the run before a restart finds it. The `account` may have
        `most` runs. Raises MeshError RUN_EXISTS, RUN_LIMIT_REACHED, NO_ROOM_FOR_RUN and INVALID_REQUEST.
        """
        known = self._added.get(run_id)
        if known is None or not request_id or known.row.request_id != request_id:
            held = [added.row.run_id for added in self._added.values() if added.row.account == account]
            if most is not None and len(held) >= most:
                raise MeshError(
                    Reason.RUN_LIMIT_REACHED,
                    f"the token {account} may have {most} runs (--max-runs) and has {', '.join(map(repr, held))};"
                    " delete one, or ask for a token with more",
                )
            row = _Row(
                run_id=run_id, settings=settings, create_time=time.time(), request_id=request_id, account=account
            )
            await self._make(row)
            await self._write_index()
        return self.info(self._table.find(run_id))

    async def suspend(self, run_id: str, message: str, *, by: str = "") -> RunInfo:
        queue = self._table.find(run_id)
        if queue.book.suspension is None:
            queue.book.suspension = Suspension(message=message or "a caller suspended it", by=by)
            await queue.at_rest()
            await self._write_index()
        return self.info(queue)

    async def resume(self, run_id: str) -> RunInfo:
        """Tries a failed publication again, and makes a run with lost weights anew."""
        queue = self._table.find(run_id)
        run_id = queue.book.run_id
        if queue.book.suspension is not None:
            added = self._added.get(run_id)
            if added is not None and added.run.training.lost:
                await self._make_anew(run_id)
                return self.info(self._table.find(run_id))
            queue.resume()
            if added is not None and queue.book.phase is RunPhase.CREATING:
                self._begin(added)
            elif added is not None:
                await self._table.call(added.run.training.resume)
            await self._write_index()
        return self.info(queue)

    async def delete(self, run_id: str, *, keep_checkpoints: bool = False) -> None:
        """Removes a run after its present step. Raises MeshError UNKNOWN_RUN, and RUN_PROTECTED for the own."""
        queue = self._table.find(run_id)
        run_id = queue.book.run_id
        added = self._added.get(run_id)
        if added is None:
            raise MeshError(Reason.RUN_PROTECTED, f"run {run_id!r} is this trainer's own; use Drain to end it")
        self._check_not_made(run_id)
        queue.book.phase = RunPhase.DELETING
        queue.book.draining = True
        if added.opening is not None:
            added.opening.cancel()
        await queue.at_rest()

        await self._table.call(lambda: self._remove(added))
        del self._added[run_id]
        queue.book.fail_all(Reason.UNKNOWN_RUN, f"run {run_id!r} was deleted")
        queue.close()
        self._table.remove(run_id)
        try:
            await added.run.retire()
        except MeshError as error:  # the hub forgets the run with its log
            logger.warning("the hub could not let go of run {!r}: {}", run_id, error)
        await added.run.close()
        await self._write_index()
        if not keep_checkpoints:
            await asyncio.to_thread(shutil.rmtree, self._maker.folder(run_id, added.row.settings), ignore_errors=True)
        logger.info("run {!r} is deleted", run_id)

    # --- the program's start and end ----------------------------------------------------------------

    async def bring_back(self) -> None:
        """Makes the runs of the index again. One that cannot be made is left out."""
        for row in await asyncio.to_thread(self._read_index):
            try:
                await self._make(_Row.model_validate(row))
            except (ValueError, MeshError) as error:
                logger.error("run {!r} is not brought back: {}; its folder stays", row["run_id"], error)

    async def close(self) -> None:
        for added in self._added.values():
            if added.opening is not None:
                added.opening.cancel()
            added.queue.close()
            await added.run.close()
        if self._tasks:  # a training thread that is stuck answers none of them
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    # --- inner --------------------------------------------------------------------------------------

    async def _make(self, row: _Row) -> None:
        run_id = row.run_id
        if run_id in self._making or any(queue.book.run_id == run_id for queue in self._table):
            raise MeshError(Reason.RUN_EXISTS, f"this trainer holds run {run_id!r} already; choose another run_id")
        if Path(run_id).name != run_id or run_id in (INDEX, ".", ".."):
            problem = FieldViolation("run_id", f"must be the name of a folder, got {run_id!r}")
            raise invalid([problem], "the new run")
        if len(self._added.keys() | self._making) >= self.max_runs:
            raise MeshError(
                Reason.RUN_LIMIT_REACHED,
                f"this trainer holds {len(self._added)} runs beside its own, as many as it may; delete one, or raise"
                " trainer.max_concurrent_runs",
            )
        self._making.add(run_id)
        try:
            await self._open(row)
        finally:
            self._making.discard(run_id)

    async def _make_anew(self, run_id: str) -> None:
        self._check_not_made(run_id)
        self._making.add(run_id)
        before = self._added[run_id]
        try:
            await self._table.call(lambda: self._remove(before))
            await before.run.close()
            await self._open(before.row.model_copy(update={"suspension": None}))
        finally:
            self._making.discard(run_id)
        before.queue.close()  # its watchers come again, and find the new epoch
        await self._write_index()

    def _check_not_made(self, run_id: str) -> None:
        if run_id in self._making:
            text = f"run {run_id!r} is being made anew from its checkpoint; try again"
            raise MeshError(Reason.UNREACHABLE, text, retry_after_s=1.0)

    async def _open(self, row: _Row) -> None:
        run_id, settings = row.run_id, row.settings
        epoch = await asyncio.to_thread(next_epoch, self._maker.folder(run_id, settings) / EPOCH)
        try:
            rank_run, needed = await self._table.call(lambda: self._make_on_ranks(run_id, settings))
        except ValueError as error:
            raise invalid([FieldViolation("spec.adapter", str(error))], "the new run") from error
        book = StepBook(
            run_id=run_id,
            epoch=epoch,
            start_step=rank_run.state.step_done,
            durable_step=rank_run.state.step_done,
            max_queued=settings.max_queued_batches,
            max_steps=settings.max_steps,
            history_events=self._history_events,
            checkpoints=Layout(self._maker.folder(run_id, settings)).checkpoints,
            spec=settings.spec,
            create_time=row.create_time,
            adapter_bytes=needed,
            suspension=row.suspension,
        )
        queue = TrainingQueue(book, self._table.changed, held=True)

        def open_run() -> OpenRun:
            try:
                run = self._open_run(rank_run, queue, settings, epoch)
            except BaseException:  # whatever it is, the name is free again
                self._forget(rank_run)
                raise
            self._loop.add(run.training, settings.share)
            return run

        added = _Added(row=row, queue=queue, rank_run=rank_run, run=await self._table.call(open_run))
        self._table.put(queue)
        queue.on_suspended = lambda: self._after_suspension(added)
        self._added[run_id] = added
        logger.info("run {!r} is added at step {} (epoch {})", run_id, book.step, epoch)
        if row.suspension is None:
            self._begin(added)

    def _make_on_ranks(self, run_id: str, settings: RunSettings) -> tuple[RankRun, int]:
        needed = self._maker.bytes_for(settings)
        used = sum(added.queue.book.adapter_bytes for name, added in self._added.items() if name != run_id)
        if self.room_bytes is not None and used + needed > self.room_bytes:
            raise MeshError(
                Reason.NO_ROOM_FOR_RUN,
                f"the adapter of run {run_id!r} takes {_mib(needed)} with its gradient and optimizer, and of"
                f" {_mib(self.room_bytes)} for adapters {_mib(self.room_bytes - used)} are free;"
                " lower its rank, delete a run, or raise trainer.max_adapters_gib",
            )
        self._commands.send(CreateCommand(run_id=run_id, settings=settings))
        return self._maker.make(run_id, settings), needed

    def _remove(self, added: _Added) -> None:
        if self._loop.remove(added.row.run_id):
            self._forget(added.rank_run)

    def _forget(self, run: RankRun) -> None:
        self._commands.send(DeleteCommand(run_id=run.state.run_id))
        self._maker.forget(run, self._own)

    def _begin(self, added: _Added) -> None:
        book = added.queue.book

        async def begin() -> None:
            try:
                await added.run.first()
            except (MeshError, OSError) as error:
                reason = error.reason.name if isinstance(error, MeshError) else Reason.INTERNAL.name
                message = f"version {book.step} could not be published: {error}"
                logger.error("run {!r} is suspended: {}", book.run_id, message)
                added.queue.suspend(Suspension(reason=reason, message=message))
            else:
                added.queue.open()

        added.opening = asyncio.create_task(begin())

    def _after_suspension(self, added: _Added) -> None:
        async def act() -> None:
            try:
                if self._added.get(added.row.run_id) is not added:  # it is gone, or was made anew
                    return
                if added.run.training.lost and added.queue.book.durable_step:
                    await self._make_anew(added.row.run_id)
                else:
                    await self._write_index()
            except MeshError as error:
                logger.error("run {!r} stays suspended: {}", added.row.run_id, error)
            except OSError as error:
                logger.error("{} cannot be written, so a restart forgets a suspension: {}", self._index, error)

        self._tasks.add(task := asyncio.create_task(act()))
        task.add_done_callback(self._tasks.discard)

    async def _write_index(self) -> None:
        async with self._index_lock:
            rows = [
                added.row.model_copy(update={"suspension": added.queue.book.suspension}).model_dump(mode="json")
                for added in self._added.values()
            ]
            self._index.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_file, self._index, json.dumps({"runs": rows}, indent=1).encode())

    def _read_index(self) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = json.loads(self._index.read_bytes())["runs"]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{self._index} is damaged: {error!r}; restore it, or delete it to start without the added runs"
            ) from error
        return rows


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
