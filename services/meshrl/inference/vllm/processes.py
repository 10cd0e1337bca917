"""Starts vLLM's processes out of a fork server, which imports vLLM while this program does.

vLLM would start a new interpreter for each, one after the other: some 14 s on a GPU machine. The fork server never
touches a GPU, and its imports start no thread that a fork would lack. On a CPU, where vLLM binds threads as an
interpreter starts, there is none. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOADED = "meshrl.inference.vllm.preload"


class _SameEnvironment(ForkServerProcess):
    """Has the variables of its starter, not those of the fork server's start, and starts others out of the same fork
    server."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        _SERVER.ensure_running = lambda: None  # it runs, though as a child of another process
        if "vllm" in sys.modules:
            from meshrl.inference.vllm.installed import start_processes_by

            start_processes_by(ForkServer())  # the workers of an engine that is split over several GPUs
        super().run()


class ForkServer(ForkServerContext):
    Process = _SameEnvironment


def prepare_environment(torch_threads: int | None) -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if torch_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(torch_threads)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else vLLM counts and binds threads by itself
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def import_ahead(torch_threads: int | None) -> None:
    """Starts the fork server, which imports PRELOADED while this program imports the same."""
    prepare_environment(torch_threads)
    multiprocessing.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()


@contextmanager
def kept_variable(name: str) -> Iterator[None]:
    """Restores the variable, or its absence, afterwards."""
    value = os.environ.get(name)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def imports_ahead() -> bool:
    return _SERVER._forkserver_address is not None


_SERVER: Any = forkserver._forkserver
