"""The only thread of rank 0 that touches the model and calls collectives.

torch's current GPU and OpenMP's threads are a thread's own, and collectives need one order.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class TrainingThread:
    """Runs calls one after another. A daemon: a step that hangs must not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="training", daemon=True).start()

    def call(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Has the thread run `work` after earlier calls."""
        run, done = promised(work)
        self._calls.put(run)
        return asyncio.wrap_future(done)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # what it returned must not live until the next call


def promised(work: Callable[[], Result]) -> tuple[Callable[[], None], Future[Result]]:
    """A call of `work` for another thread, and its outcome. A caller that stops waiting does not stop the work."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    return run, done
