"""Tokenizers for prompts: several at work at once, each for a bounded time.

Encoding changes a tokenizer's state, so every prompt at work has a copy and a thread of its own. The thread of one that
takes too long gets an exception at the next Python instruction; a call into a compiled tokenizer goes on to its end.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from meshrl.wire.errors import MeshError, Reason

LOOK_S = 0.05

Result = TypeVar("Result")
Work = Callable[[PreTrainedTokenizerBase], Result]


class _Overrun(BaseException):
    """Raised inside a thread that has to end; libraries' `except Exception` does not keep it."""


class TokenizerPool:
    """At most `workers` at once, each for at most `limit_s`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, workers: int, limit_s: float) -> None:
        self._original = tokenizer
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(workers)
        self._free: list[PreTrainedTokenizerBase] = []
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, work: Work[Result]) -> Result:
        """Waits for a place. Raises MeshError INVALID_REQUEST when the work took too long, and the errors of `work`."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        thread = threading.Thread(target=self._work, args=(work, loop, done), daemon=True, name="tokenizer")
        try:
            thread.start()
        except RuntimeError:  # this system gives no more threads
            self._places.release()
            raise
        try:
            return await asyncio.wait_for(asyncio.shield(done), self._limit_s)
        except TimeoutError as late:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"rendering and tokenizing this prompt took more than {self._limit_s:g} s; send a shorter prompt, or "
                "one with a simpler template",
            ) from late
        finally:
            if done.done():
                self._places.release()
            else:  # too late, or the client has left
                ending = asyncio.create_task(self._end(thread))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _work(self, work: Work[Result], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Result]) -> None:
        with suppress(_Overrun):  # nobody waits for the result any more
            tokenizer = None
            try:
                tokenizer = self._take()
                outcome = functools.partial(done.set_result, work(tokenizer))
            except Exception as error:  # noqa: BLE001 - belongs to whoever waits
                outcome = functools.partial(done.set_exception, error)
            if tokenizer is not None:
                self._free.append(tokenizer)

            def answer() -> None:
                if not done.done():
                    outcome()

            with suppress(RuntimeError):  # the loop is closed: the program ends
                loop.call_soon_threadsafe(answer)

    def _take(self) -> PreTrainedTokenizerBase:
        try:
            return self._free.pop()
        except IndexError:
            return copy.deepcopy(self._original)

    async def _end(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Overrun))
            await asyncio.sleep(LOOK_S)
        self._places.release()
