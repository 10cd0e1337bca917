"""One log format for every program: loguru, with the standard library's logging led into it. A line that is logged
during a span has the id of its trace."""

from __future__ import annotations

import inspect
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger
from opentelemetry import trace

from meshrl.core.durable import disk_trouble

if TYPE_CHECKING:
    from loguru import Record

FORMAT = (
    "<green>{time:YYYY-MM-DDTHH:mm:ss.SSS}</green> <level>{level: <7}</level> "
    "<cyan>{extra[process]}</cyan> <level>{message}</level>"
)
# Libraries that log every request at INFO, which is shown from level debug on.
_CHATTY = ("aiohttp.access", "asyncio", "filelock", "httpcore", "httpx", "mcp", "openai", "urllib3")
# Has several lines for each new channel at DEBUG, and no other use for that level.
_GRPC = "grpc._cython.cygrpc"
# Errors of this module are a stranger's bytes that are no HTTP: answered with 400, but logged with a traceback each.
_BAD_HTTP = "aiohttp.http_exceptions"
# What gRPC logs as an error with a traceback where a caller's end, such as its deadline, overtakes an answer to it.
_CALL_IS_OVER = 'Failed "execute_batch"'

LAUNCHER_LOGS = "MESHRL_LAUNCHER_LOGS"
"""Set where a launcher logs the output, on another node."""


class _IntoLoguru(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:  # a level of the library's own
            level = record.levelno
        frame, depth = inspect.currentframe(), 0
        while frame is not None and (depth == 0 or frame.f_code.co_filename == logging.__file__):
            frame, depth = frame.f_back, depth + 1
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__module__ == _BAD_HTTP:
            logger.opt(depth=depth).warning("{}: {}", record.getMessage(), " ".join(str(error).split()))
            return
        if type(error).__name__ == "ExecuteBatchError" and str(error).startswith(_CALL_IS_OVER):
            logger.opt(depth=depth).debug("{}: the call was over before its answer", record.getMessage())
            return
        logger.opt(depth=depth, exception=record.exc_info).log(level, "{}", record.getMessage())


class _LogFile:
    """A full disk loses lines, which stderr reports once, and never ends the program."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise SystemExit(disk_trouble(error) or f"cannot write {path}: {error}") from error
        self._path = path
        self._failing = False

    def write(self, line: str) -> None:
        try:
            self._file.write(line.encode())
        except OSError as error:
            if not self._failing:
                sys.stderr.write(f"log lines are lost: {disk_trouble(error) or error} ({self._path})\n")
            self._failing = True
        else:
            self._failing = False

    def stop(self) -> None:
        self._file.close()


def with_trace(line: str) -> Callable[[Record], str]:
    """A format of text lines with the record's trace behind, if it has one."""

    def of_record(record: Record) -> str:
        behind = " <dim>trace={extra[trace_id]}</dim>" if "trace_id" in record["extra"] else ""
        return f"{line}{behind}\n{{exception}}"

    return of_record


def _note_trace(record: Record) -> None:
    context = trace.get_current_span().get_span_context()
    if context.is_valid and "trace_id" not in record["extra"]:
        record["extra"] |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def setup_logging(name: str, level: str, log_file: Path | None = None, *, json_logging: bool = False) -> None:
    """Sends everything at `level` or above to stdout, and to `log_file`, unless stdout is a file of its folder;
    replaces an earlier setup. Ends the process with one sentence if that file cannot be made."""
    level = level.upper()
    logger.remove()
    logger.configure(extra={"process": name}, patcher=_note_trace)
    line = with_trace(FORMAT)
    logger.add(sys.stdout, level=level, format=line, serialize=json_logging, backtrace=False, diagnose=False)
    if log_file is not None and not stdout_goes_beside(log_file):
        logger.add(
            _LogFile(log_file),
            level=level,
            format=line,
            serialize=json_logging,
            colorize=False,
            backtrace=False,
            diagnose=False,
        )
    logging.basicConfig(handlers=[_IntoLoguru()], level=level if level != "TRACE" else "DEBUG", force=True)
    logging.captureWarnings(True)
    logging.getLogger(_GRPC).setLevel(logging.INFO)
    for library in _CHATTY:
        logging.getLogger(library).setLevel(logging.INFO if level in ("TRACE", "DEBUG") else logging.WARNING)


def stdout_goes_beside(log_file: Path) -> bool:
    """Whether stdout is a file of the same folder: a launcher's log, which would have every line twice."""
    if os.environ.get(LAUNCHER_LOGS):
        return True
    try:
        stdout = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):  # closed, or no file at all, as under a test runner
        return False
    if not stat.S_ISREG(stdout.st_mode) or not log_file.parent.is_dir():
        return False
    with os.scandir(log_file.parent) as entries:
        return any(entry.inode() == stdout.st_ino for entry in entries)
