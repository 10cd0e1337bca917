"""Leads a worker's output into a file for each environment it hosts, and one for the rest.

logs/envs/{train,eval}/NAME/env_worker_N.log has the output while environment NAME played in worker N, or all of a
worker of one environment. Output without a known environment (a program that one of them starts, a crash of the
interpreter) goes to logs/envs/env_worker_N.log.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from loguru import logger

from meshrl.core.config.shared import EnvConfig, LogConfig
from meshrl.core.paths import Layout
from meshrl.core.telemetry.log_folder import log_place
from meshrl.core.telemetry.logs import setup_logging, with_trace
from meshrl.rollout.workers.watchdog import environment_now
from meshrl.wire.values import JsonObject

SERVER_LOG = "env_server.log"
LINE = "{time:YYYY-MM-DDTHH:mm:ss.SSS} {level: <7} {message}"


def env_folder(output_dir: Path, entry: EnvConfig) -> Path:
    return log_place(Layout(output_dir), "envs", entry.part, entry.resolved_name.replace("/", "_"))


def log_environments(entries: Iterable[EnvConfig], output_dir: Path) -> None:
    """Sends the front's log about an environment to its env_server.log too."""
    for entry in entries:
        _log_to(env_folder(output_dir, entry) / SERVER_LOG, entry.resolved_name, "DEBUG")


def take_over_output(entries: Sequence[EnvConfig], number: int, output_dir: Path, config: LogConfig) -> None:
    """Of worker `number`, which is this process."""
    file = f"env_worker_{number}.log"
    hosted = {entry.resolved_name: env_folder(output_dir, entry) / file for entry in entries}
    rest = log_place(Layout(output_dir), "envs", file)
    if len(hosted) == 1:  # all of it is the one environment's
        rest, hosted = next(iter(hosted.values())), {}
    rest.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(rest, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    faulthandler.enable(sys.stderr)
    setup_logging(f"worker {number}", config.level, json_logging=config.json_logging)
    for name, path in hosted.items():
        _log_to(path, name, config.level.upper())
    if hosted:
        sys.stdout = _ByEnvironment(sys.stdout, hosted)
        sys.stderr = _ByEnvironment(sys.stderr, hosted)


class _ByEnvironment:
    def __init__(self, rest: TextIO, paths: Mapping[str, Path]) -> None:
        self._rest = rest
        self._paths = paths
        self._files: dict[str, TextIO] = {}

    def write(self, text: str) -> int:
        name = environment_now()
        if name not in self._paths:
            return self._rest.write(text)
        if name not in self._files:
            self._paths[name].parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = self._paths[name].open("a", buffering=1)
        return self._files[name].write(text)

    def flush(self) -> None:
        self._rest.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._rest, name)


def _log_to(path: Path, environment: str, level: str) -> None:
    def belongs(record: JsonObject) -> bool:
        return bool(record["extra"].get("env") == environment)

    logger.add(path, filter=belongs, level=level, delay=True, format=with_trace(LINE), colorize=False)
