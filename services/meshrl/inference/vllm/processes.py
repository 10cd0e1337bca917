"""Starts vLLM's processes out of a fork server, which imports vLLM at the time at which this program does.

vLLM would start a new interpreter for each, one after the other, which imports torch and vLLM again: some 14 s on a GPU
machine. The fork server never touches a GPU, and what it imports starts no thread that a fork would lack. On a CPU,
where vLLM binds threads as an interpreter starts, there is none. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOADED = "meshrl.inference.vllm.preload"


class _SameEnvironment(ForkServerProcess):
    """A process with the variables of the one that starts it. The fork server has those of its own start."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        super().run()


class ForkServer(ForkServerContext):
    """The `multiprocessing` context of such processes."""

    Process = _SameEnvironment


def prepare_environment(torch_threads: int | None) -> None:
    """vLLM's processes take what they read from their environment from here: to start quietly, with these threads."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if torch_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(torch_threads)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else vLLM counts and binds threads by itself
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def import_ahead(torch_threads: int | None) -> None:
    """Starts the fork server, which imports PRELOADED meanwhile; before this program imports the same."""
    prepare_environment(torch_threads)
    multiprocessing.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()


def imports_ahead() -> bool:
    """Whether `import_ahead` was called."""
    return _SERVER._forkserver_address is not None


def keep_fork_server() -> None:
    """Called in the fork server: what comes out of it starts processes there, too, and not out of one of its own."""
    _SERVER.ensure_running = lambda: None


_SERVER: Any = forkserver._forkserver
