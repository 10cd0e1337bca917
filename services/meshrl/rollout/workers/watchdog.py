"""Finds out, inside a worker, which environment's code holds the event loop up or ends the process.

A thread looks at the loop's stack. The code of an environment runs in a context that names it (`playing`), which the
loop's own frame at the bottom of the stack holds. While code in C holds the interpreter's lock, nothing is reported.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from pathlib import Path
from types import FrameType
from typing import NoReturn

from meshrl.rollout.workers.blame import NO_ROLLOUT

LOOK_EVERY_S = 0.25
BLOCKED_AFTER_S = 0.75

_NOBODY = ("", NO_ROLLOUT)
_PLAYING: ContextVar[tuple[str, str]] = ContextVar("meshrl_playing", default=_NOBODY)


def report(to: socket.socket, kind: str, **fields: object) -> None:
    """May be called from any thread."""
    with suppress(OSError):  # the front is gone, or has not read the last ones yet
        to.send(json.dumps({"kind": kind, **fields}).encode() + b"\n", socket.MSG_DONTWAIT)


@contextmanager
def playing(environment: str, rollout: str) -> Iterator[None]:
    """Code that starts within belongs to this rollout, in tasks and threads of asyncio as well."""
    token = _PLAYING.set((environment, rollout))
    try:
        yield
    finally:
        _PLAYING.reset(token)


def environment_now() -> str:
    return _PLAYING.get()[0]


def starved_s(native_id: int) -> float:
    """Seconds that a thread of this process could run and had no processor, since it began; 0 where Linux does not
    count them."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Watchdog:
    """Watches the event loop of the thread that makes it. `start` it there, once."""

    def __init__(self, reports: socket.socket, starved_s: Callable[[int], float] = starved_s) -> None:
        self._reports = reports
        self._thread_id, self._native_id = threading.get_ident(), threading.get_native_id()
        self._starved_s = starved_s

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        exit_at_once, worker = os._exit, os.getpid()

        def leave(status: int) -> NoReturn:
            environment, rollout = _PLAYING.get()
            if os.getpid() == worker and environment:  # not in what an environment forks
                report(self._reports, "leaving", environment=environment, rollout=rollout)
            exit_at_once(status)

        os._exit = leave  # the one way out of a process that leaves no trace of who took it

    def _watch(self) -> None:
        # The handle itself, not its id: a new one may take the place of one that is gone.
        seen: asyncio.Handle | None = None
        blocked_s = said_s = 0.0
        looked, starved = time.monotonic(), self._starved_s(self._native_id)
        while True:
            time.sleep(LOOK_EVERY_S)
            handle, top = self._running_handle()
            looked, before = time.monotonic(), looked
            starved, starved_before = self._starved_s(self._native_id), starved
            if handle is None or handle is not seen:
                seen, blocked_s, said_s = handle, 0.0, 0.0
                continue
            # What a machine that stood still took, or gave to other programs, is nobody's.
            blocked_s += max(0.0, min(looked - before, 2 * LOOK_EVERY_S) - (starved - starved_before))
            if blocked_s - said_s < BLOCKED_AFTER_S:
                continue
            said_s = blocked_s
            context: Context = handle._context  # type: ignore[attr-defined]  # public from Python 3.12 on
            environment, rollout = context.get(_PLAYING) or _NOBODY
            where = "" if top is None else f"{top.f_code.co_name} ({Path(top.f_code.co_filename).name}:{top.f_lineno})"
            held = {"environment": environment, "rollout": rollout, "where": where, "seconds": blocked_s}
            report(self._reports, "blocked", **held)

    def _running_handle(self) -> tuple[asyncio.Handle | None, FrameType | None]:
        collects = gc.isenabled()
        # Before Python 3.12, a collection within `_current_frames` may let a thread run that begins or ends and waits
        # for the list of threads, which that call has locked: neither goes on.
        gc.disable()
        try:
            top = frame = sys._current_frames().get(self._thread_id)
        finally:
            if collects:
                gc.enable()
        while isinstance(frame, FrameType):  # CPython 3.11 was seen to give another object for a thread that runs on
            if frame.f_code is asyncio.Handle._run.__code__:
                return frame.f_locals["self"], top
            frame = frame.f_back
        return None, None
