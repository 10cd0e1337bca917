"""Starts the programs of a run, and ends all when one is done or dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from meshrl.core.orphans import RUN_MARK, guardian_command
from meshrl.core.paths import is_gone
from meshrl.core.program import BAD_CONFIGURATION, READY_FILE, how_it_ended
from meshrl.core.waiting import CANCEL_DEADLINE_S, StoppedError, stop_or_first, unless_stopped
from meshrl.launch.logtail import LogTail, last_lines

RESTART_PAUSE_S = 0.5
MAX_FAILED_STARTS = 3
"""In a row, before it served: the program is unable to start."""
KILL_WAIT_S = 2.0
REMOVAL_WAIT_S = 30.0
TAIL_POLL_S = 0.2
READY_POLL_S = 0.1
LOST_POLL_S = 5.0
"""Between looks at the run's folder, which is lost when two in a row find no file."""
WAIT_FOR_WORD = ("/bin/sh", "-c", 'read -r word && exec "$@" </dev/null', "sh")
"""Becomes the command that follows once its stdin has a line."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The run is over when every `leader` has ended."""

    name: str
    command: Sequence[str]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    end_stage: int = 0
    leader: bool = False
    """Its log is shown. If it fails, other leaders go on."""

    title: str = ""
    """Before each line of a leader's log that is shown."""

    restarts: int = 0
    """When it dies, but for MAX_FAILED_STARTS."""

    resumed: Callable[[], Sequence[str]] = tuple
    """Further arguments of the command of a restart."""

    after: Sequence[str] = ()
    """Programs that must serve before it starts."""

    ends_on_usr1: bool = False
    """Instead of TERM: a step of a SLURM job, which srun kills on TERM."""


@dataclass(frozen=True, kw_only=True)
class Grace:
    shutdown_s: float = 60.0
    failure_s: float = 4.0
    cause_s: float = 1.0
    """After the leader failed: the wait for another program's end, which may be the cause and is then named."""


@dataclass(kw_only=True)
class _Child:
    program: Program
    process: asyncio.subprocess.Process
    log_start: int
    restarts_left: int
    ready: Path
    """It makes this file once it serves."""

    failed_starts: int
    exited: asyncio.Task[int] | None = None


class Supervisor:
    """Nothing is left running after `run`.

    Each program has a session of its own, so that its children end with it. A guardian process ends them all if this
    process is killed, holds `lock_fd` until then, ends programs that left their session and removes the `temporary`
    folders.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        grace: Grace | None = None,
        show: Callable[[str], object] | None = None,
        lock_fd: int | None = None,
        temporary: Sequence[Path] = (),
        landmarks: Sequence[Path] = (),
        guests: Callable[[], Sequence[str]] = lambda: (),
        check: Callable[[], Coroutine[None, None, bool]] | None = None,
    ) -> None:
        """`landmarks` are files of the run's folder: without any of them the run has failed. `guests` are runs of
        others, for which the programs go on after the last leader. Leaders start once `check` has returned True."""
        self._programs = programs
        self._landmarks, self._guests = landmarks, guests
        self._check = check
        self._lock_fd = lock_fd
        self._temporary = temporary
        self._grace = grace or Grace()
        self._show = show or sys.stdout.write
        self._children: dict[str, _Child] = {}
        self._held: set[asyncio.Task[None]] = set()  # programs that wait for others
        self._guardian: asyncio.subprocess.Process | None = None
        self._ready_folder = Path()  # made by `run`
        self._mark = secrets.token_hex(16)

    async def run(self, stop: asyncio.Event, lead: Coroutine[None, None, int] | None = None) -> int:
        """Returns the exit code: 0 when the run is over or was stopped in order, BAD_CONFIGURATION when the check has
        returned False, else 1.

        `lead` leads in place of a program, with its exit code and exceptions. It is cancelled when a program dies, or
        on `stop` if it does not end by itself.
        """
        tails = [
            LogTail(program.log, partial(self._show_of, program.title)) for program in self._programs if program.leader
        ]
        showing = [asyncio.create_task(tail.follow(TAIL_POLL_S)) for tail in tails]
        leading = None if lead is None else asyncio.ensure_future(lead)
        losing = asyncio.create_task(self._lose_folder())
        try:
            with tempfile.TemporaryDirectory(prefix="meshrl-rl-", ignore_cleanup_errors=True) as folder:
                self._ready_folder = Path(folder)
                self._guardian = await asyncio.create_subprocess_exec(
                    *guardian_command(self._grace.failure_s, [*self._temporary, self._ready_folder], mark=self._mark),
                    stdin=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=() if self._lock_fd is None else (self._lock_fd,),
                )
                await self._start_all(lambda program: self._check is None or not program.leader)
                if self._check is not None:  # what has died meanwhile may have died of what it finds
                    with contextlib.suppress(StoppedError):
                        if not await unless_stopped(stop, self._check()):
                            return BAD_CONFIGURATION
                        await self._start_all(lambda program: program.leader)
                return await self._watch(stop, leading, losing)
        except OSError as error:
            logger.error("a program cannot be started: {}", error)
            return 1
        finally:
            for waiting in (*self._held, losing):
                waiting.cancel()
            if leading is not None:
                leading.cancel()
                await asyncio.wait({leading}, timeout=CANCEL_DEADLINE_S)
            await self._end(self._grace.failure_s, in_stages=False)
            await self._stop_guardian()
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)
            for tail in tails:
                tail.read()

    def _show_of(self, title: str, text: str) -> None:
        self._show(f"{title} | {text}" if title else text)

    def _tell_guardian(self, word: str, group: int) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.write(f"{word}{group}\n".encode())

    async def _stop_guardian(self) -> None:
        if self._guardian is None or self._guardian.stdin is None:
            return
        self._guardian.stdin.close()
        try:
            await asyncio.wait_for(self._guardian.wait(), self._grace.failure_s + REMOVAL_WAIT_S)
        except TimeoutError:  # it ends by itself once the folders are removed
            logger.warning("the guardian (pid {}) still removes temporary folders", self._guardian.pid)

    async def _start_all(self, chosen: Callable[[Program], bool]) -> None:
        for program in filter(chosen, self._programs):
            await self._start(program, program.command, program.restarts)

    async def _start(
        self, program: Program, command: Sequence[str], restarts_left: int, failed_starts: int = 0
    ) -> None:
        """It runs only once the guardian knows of it, so that it never outlives a killed rl."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        program.log.parent.mkdir(parents=True, exist_ok=True)
        ready = self._ready_folder / f"{program.name}.{restarts_left}"  # of this start alone
        with program.log.open("ab") as log:
            start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *WAIT_FOR_WORD,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **program.environ,
                    READY_FILE: str(ready),
                    RUN_MARK: self._mark,
                },
                start_new_session=True,
            )
        self._tell_guardian("+", process.pid)
        child = _Child(
            program=program,
            process=process,
            log_start=start,
            restarts_left=restarts_left,
            ready=ready,
            failed_starts=failed_starts,
        )
        child.exited = asyncio.create_task(process.wait())
        self._children[program.name] = child
        if self._serve(program.after):
            self._let_run(child)
            return
        logger.info("{} starts once {} serves", program.name, " and ".join(program.after))
        waiting = asyncio.create_task(self._run_after(child))
        self._held.add(waiting)
        waiting.add_done_callback(self._held.discard)

    def _serve(self, names: Sequence[str]) -> bool:
        return all(name in self._children and self._children[name].ready.exists() for name in names)

    async def _run_after(self, child: _Child) -> None:
        while not self._serve(child.program.after):  # noqa: ASYNC110  # another process makes the file
            await asyncio.sleep(READY_POLL_S)
        if child.process.returncode is None:
            self._let_run(child)

    def _let_run(self, child: _Child) -> None:
        assert child.process.stdin is not None, "it is a pipe"
        child.process.stdin.write(b"run\n")
        child.process.stdin.close()
        logger.info("started {} (pid {}), log in {}", child.program.name, child.process.pid, child.program.log)

    def _folder_is_lost(self) -> bool:
        return bool(self._landmarks) and all(map(is_gone, self._landmarks))

    async def _lose_folder(self) -> None:
        """A network file system may miss a file for a moment."""
        missed = 0
        while missed < 2:
            await asyncio.sleep(LOST_POLL_S)
            missed = missed + 1 if await asyncio.to_thread(self._folder_is_lost) else 0

    async def _watch(self, stop: asyncio.Event, leading: asyncio.Future[int] | None, losing: asyncio.Task[None]) -> int:
        ends: list[asyncio.Future[Any]] = [] if leading is None else [leading]
        staying: asyncio.Task[None] | None = None  # for the runs of others, once the leaders have ended
        failed_leaders, led = 0, any(program.leader for program in self._programs)
        while True:
            exits = [child.exited for child in self._children.values() if child.exited is not None]
            await stop_or_first(stop, losing, *exits, *ends)
            if losing.done() and not stop.is_set():
                self._report_loss()
                return 1  # the caller's way out ends the programs
            if leading is not None and (stop.is_set() or leading.done()):
                await asyncio.wait({leading}, timeout=self._grace.shutdown_s)
                code = leading.result() if leading.done() else 1
                return await self._end_in_order() or code
            if stop.is_set():
                logger.info("ending all programs")
                return await self._end_in_order()
            if staying is not None and staying.done():
                logger.info("ending the other programs")
                return await self._end_in_order() or min(failed_leaders, 1)
            others = [running for running in exits if not running.done()]
            if others and all(child.program.leader and child.process.returncode for child in self._ended()):
                await asyncio.wait(others, timeout=self._grace.cause_s, return_when=asyncio.FIRST_COMPLETED)
            for child in self._ended():
                self._kill_rest(child)
                leaders = any(other.program.leader for other in self._children.values())
                stays = child.program.leader and (leaders or bool(self._guests()))
                if child.program.leader and child.process.returncode == 0:
                    logger.info("{} is done{}", child.program.name, "" if stays else "; ending the other programs")
                    if stays:
                        continue
                    return await self._end_in_order() or min(failed_leaders, 1)
                failed = 0 if child.ready.exists() else child.failed_starts + 1
                hopeless = child.process.returncode == BAD_CONFIGURATION or failed == MAX_FAILED_STARTS
                if await asyncio.to_thread(self._folder_is_lost):  # which is why it died
                    self._report_loss()
                    return 1
                if child.restarts_left == 0 or hopeless:
                    self._report(child, failed, "Other runs go on" if stays else "Ending all other programs")
                    if not stays:
                        return 1  # the caller's way out ends the others
                    failed_leaders += 1
                    continue
                await self._restart(child, failed)
            if staying is None and led and not any(child.program.leader for child in self._children.values()):
                staying = asyncio.create_task(self._until_alone())
                self._held.add(staying)
                ends.append(staying)

    async def _until_alone(self) -> None:
        told: Sequence[str] = ()
        while guests := self._guests():
            if guests != told:
                logger.info("the mesh goes on for {}, and ends after them; Ctrl-C ends it now", ", ".join(guests))
            told = guests
            await asyncio.sleep(LOST_POLL_S)

    def _ended(self) -> list[_Child]:
        """First a leader that is done, last one that failed, perhaps by others."""

        def order(child: _Child) -> int:
            return (2 if child.process.returncode else 0) if child.program.leader else 1

        return sorted((child for child in self._children.values() if child.process.returncode is not None), key=order)

    async def _restart(self, child: _Child, failed_starts: int) -> None:
        name, left = child.program.name, child.restarts_left - 1
        logger.warning("{} {}; starting it again ({} more times)", name, how_it_ended(child.process.returncode), left)
        if failed_starts:  # what it needs may come
            await asyncio.sleep(RESTART_PAUSE_S)
        await self._start(child.program, [*child.program.command, *child.program.resumed()], left, failed_starts)

    def _report_loss(self) -> None:
        logger.error(
            "the output folder {} was deleted or moved while the run was going on, with all that the run had written."
            " Ending all programs; start again with an output_dir that stays",
            self._landmarks[0].parent,
        )

    def _report(self, child: _Child, failed_starts: int, then: str) -> None:
        lines = last_lines(child.program.log, child.log_start)
        shown = "".join(f"\n    {line}" for line in lines) or " (empty)"
        how = how_it_ended(child.process.returncode)
        if failed_starts == MAX_FAILED_STARTS:
            how += f", the last of {failed_starts} starts in a row that ended before it served"
        logger.error(
            "{} died: {}. {}. Last lines of {}:{}",
            child.program.name, how, then, child.program.log, shown,
        )  # fmt: skip

    async def _end_in_order(self) -> int:
        ending = dict(self._children)
        killed = await self._end(self._grace.shutdown_s, in_stages=True)
        failed = False
        for name, child in ending.items():
            code = child.process.returncode
            if name in killed:
                logger.error("{} did not end within {:g} s and was killed", name, self._grace.shutdown_s)
            elif code not in (0, -signal.SIGTERM):
                logger.error("{} {} while the run was ending; see {}", name, how_it_ended(code), child.program.log)
            else:
                continue
            failed = True
        return 1 if failed else 0

    async def _end(self, grace_s: float, *, in_stages: bool) -> set[str]:
        """Asks every program to end. Returns the names of those killed."""
        deadline = asyncio.get_running_loop().time() + grace_s
        stages = sorted({child.program.end_stage for child in self._children.values()}) if in_stages else [None]
        killed: set[str] = set()
        for stage in stages:
            chosen = [child for child in self._children.values() if stage in (None, child.program.end_stage)]
            killed |= await self._end_some(chosen, deadline)
        return killed

    async def _end_some(self, children: Sequence[_Child], deadline: float) -> set[str]:
        waits = [child.exited for child in children if child.exited is not None]
        if not waits:
            return set()
        for child in children:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    child.process.send_signal(signal.SIGUSR1 if child.program.ends_on_usr1 else signal.SIGTERM)
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait(waits, timeout=left_s)
        killed = {child.program.name for child in children if child.process.returncode is None}
        for child in children:
            self._kill_rest(child)
        await asyncio.wait(waits, timeout=KILL_WAIT_S)
        return killed

    def _kill_rest(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError):  # as it should be: nothing was left
            os.killpg(child.process.pid, signal.SIGKILL)
        if self._children.pop(child.program.name, None) is not None:
            self._tell_guardian("-", child.process.pid)
