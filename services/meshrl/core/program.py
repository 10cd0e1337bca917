"""One main for all programs: logging, tracing, signals, the event loop, and exit codes.
Exit codes: 0 for work done or a requested stop, 2 for a wrong configuration, 1 for any other failure, 128 plus its
number after a second signal.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from loguru import logger

from meshrl.core.config.base import ConfigError
from meshrl.core.config.shared import LogConfig
from meshrl.core.durable import disk_trouble
from meshrl.core.paths import Layout
from meshrl.core.private_folders import ReadableBy, keep_to
from meshrl.core.telemetry.log_folder import log_place, own_log
from meshrl.core.telemetry.logs import setup_logging, stdout_goes_beside
from meshrl.machine.fitness import open_files
from meshrl.wire.errors import MeshError

if TYPE_CHECKING:  # takes long to import, and not every process traces
    from opentelemetry.trace import Tracer

    from meshrl.core.telemetry.tracing import Tracing

BAD_CONFIGURATION = 2
FAILED = 1
OPEN_FILES = 65536
STATELESS = frozenset({"inference", "rollout"})
"""Programs whose output folder holds nothing but logs and traces: they go on without it."""
LARGEST_ON_HEAP, KEPT_FREE = 32 * 2**20, 64 * 2**20
"""Limits of glibc's allocator, in bytes, which it reaches by itself after a freed block of 32 MiB."""
BLOCKING_THREADS = 8
"""Python's own 32 of a large machine come up one by one, each with memory of its own."""


class ProgramConfig(Protocol):
    @property
    def output_dir(self) -> Path: ...

    @property
    def readable_by(self) -> ReadableBy: ...

    @property
    def log(self) -> LogConfig: ...

    @property
    def notes(self) -> tuple[str, ...]: ...


ConfigT = TypeVar("ConfigT", bound=ProgramConfig)

READY_FILE = "MESHRL_READY_FILE"
"""Names a file that a program creates once it is ready."""

GROUP_LOG = "MESHRL_GROUP_LOG"
"""Set for ranks: the log chosen by their agent, which rank 0 writes."""

Work = Callable[[asyncio.Event], Coroutine[None, None, int]]
"""Runs until the event is set or it is done. Returns the exit code."""


def run_program(
    name: str,
    config: ConfigT,
    serve: Callable[[ConfigT, asyncio.Event, Tracing], Coroutine[None, None, int]],
    *,
    blocking_threads: int | None = BLOCKING_THREADS,
) -> NoReturn:
    """Runs a whole program and ends the process with its exit code. The event of `serve` asks for a stop."""
    log_as(name, config)
    code = run_traced(name, config, serve, blocking_threads=blocking_threads)
    gc.freeze()  # the interpreter would look through all that was imported before it ends, which takes up to a second
    sys.exit(code)


def log_as(name: str, config: ProgramConfig, *, to_file: bool = True) -> None:
    """Logs to stdout, and to a file of this run, which begins with the configuration's notes."""
    keep_private(name, config)
    log_file = run_log(name, Layout(config.output_dir)) if to_file else None
    setup_logging(name, config.log.level, log_file, json_logging=config.log.json_logging)
    if to_file:
        for note in config.notes:
            logger.info("{}", note)


def keep_private(name: str, config: ProgramConfig) -> None:
    try:
        keep_to(config.readable_by, config.output_dir)
    except ConfigError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(BAD_CONFIGURATION)


def run_log(name: str, layout: Layout) -> Path:
    """Its launcher's, that of its group of ranks, or one of its own."""
    if GROUP_LOG in os.environ:
        return Path(os.environ.pop(GROUP_LOG))
    launchers = log_place(layout, f"{name}.log")
    return launchers if stdout_goes_beside(launchers) else own_log(layout, name)


def run_traced(
    name: str,
    config: ConfigT,
    serve: Callable[[ConfigT, asyncio.Event, Tracing], Coroutine[None, None, int]],
    *,
    blocking_threads: int | None = BLOCKING_THREADS,
) -> int:
    from meshrl.core.telemetry.exposition import observed  # takes long to import, and not every process traces
    from meshrl.core.telemetry.tracing import setup_tracing  # the same

    tracing = setup_tracing(name, Layout(config.output_dir).traces, config.log.traces_max_mib)

    async def watched(stop: asyncio.Event) -> int:
        lost = False

        def lose_folder() -> None:
            nonlocal lost
            lost = name not in STATELESS
            if lost:
                stop.set()
            logger.error(
                "the output folder {} was deleted or moved while {} was running; {}",
                config.output_dir, name,
                "it ends: start it again with an output_dir that stays" if lost else "its logs and traces are lost",
            )  # fmt: skip

        alone = READY_FILE not in os.environ  # else the launcher looks after the folder
        with observed(
            name, tracing.waits, tracing.registry, config.log, config.output_dir,
            on_lost_folder=lose_folder if alone else None,
        ):  # fmt: skip
            code = await serve(config, stop, tracing)
        return FAILED if lost else code

    try:
        return run(watched, blocking_threads=blocking_threads)
    finally:
        tracing.close()


def run(work: Work, *, blocking_threads: int | None = BLOCKING_THREADS) -> int:
    """Runs `work` on a new event loop; returns the exit code, of an error that of `exit_code_of`.

    The signals of `draining_signals` set the event. A second one ends the process at once, except SIGHUP, which a
    closed terminal sends twice. `blocking_threads` are those of `asyncio.to_thread`; None is Python's own number.
    """
    keep_freed_memory()
    try:
        raise_open_file_limit()
    except ConfigError as error:
        return exit_code_of(error)
    interrupted = signal.getsignal(signal.SIGINT) or signal.SIG_DFL
    try:
        return asyncio.run(_until_done_or_stopped(work, blocking_threads))
    finally:
        signal.signal(signal.SIGINT, interrupted)  # the loop leaves Python's own there, which ends in a traceback


async def _until_done_or_stopped(work: Work, blocking_threads: int | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if blocking_threads is not None:
        loop.set_default_executor(ThreadPoolExecutor(blocking_threads, thread_name_prefix="blocking"))

    def on_signal(signum: signal.Signals) -> None:
        if stop.is_set() and signum is signal.SIGHUP:
            return
        if stop.is_set():
            logger.warning("second {}: leaving at once", signum.name)
            os._exit(128 + signum)
        logger.info("{}: draining; a second SIGTERM or SIGINT ends the process at once", signum.name)
        stop.set()

    signals = draining_signals()
    for signum in signals:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        return await work(stop)
    except Exception as error:  # noqa: BLE001  # last stop of the process: the exit code says failure
        return exit_code_of(error)
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def draining_signals() -> Sequence[signal.Signals]:
    """With SIGHUP, of a terminal that was closed, unless it is ignored, as under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else []))


def exit_code_of(
    error: Exception, *, told: tuple[type[Exception], ...] = (), doing: str = "", defect: str = "the program failed"
) -> int:
    """Logs the error that ends a program: BAD_CONFIGURATION for a ConfigError, else FAILED. A MeshError, the types in
    `told` and a full disk are one line, after `doing`; any other has its traceback."""
    if isinstance(error, ConfigError):
        logger.error("{}", error)
        return BAD_CONFIGURATION
    trouble = error if isinstance(error, (MeshError, *told)) else disk_trouble(error)
    if trouble is not None:
        logger.error("{}{}", doing, trouble)
    else:
        logger.opt(exception=error).error("{}", defect)
    return FAILED


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "still runs"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "signal"
    return f"was killed by {name} ({-code})"


def say_ready(tracer: Tracer) -> None:
    """Ends the program's start; creates the file READY_FILE."""
    from meshrl.core.telemetry.start import start_of  # takes long to import, and not every process traces

    start_of(tracer).end(tracer)
    path = os.environ.get(READY_FILE)
    if path:
        with suppress(OSError):  # the starter has gone, or its disk is full: no reason to end
            Path(path).touch()


def leave(code: int) -> NoReturn:
    """Ends this process, past a group that is half gone or a thread inside torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_freed_memory() -> None:
    """Has glibc reuse the memory of large messages instead of getting their pages anew."""
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, LARGEST_ON_HEAP)  # M_MMAP_THRESHOLD
        mallopt(-1, KEPT_FREE)  # M_TRIM_THRESHOLD


def raise_open_file_limit() -> None:
    """Each rollout and stream takes a file. Raises ConfigError if too few are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    looked = open_files()
    if looked.state == "fail":
        raise ConfigError(f"{looked.found}; {looked.remedy}")
