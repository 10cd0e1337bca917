"""Tokenizers for prompts: several at work at once, each for a bounded time.

Encoding changes a tokenizer's state, so every prompt at work has a copy of its own and a thread of its own. A prompt
that takes too long is ended: its thread gets an exception at the next Python instruction, as templates and Python
tokenizers run many of; a call into a compiled tokenizer goes on to its end, which the bound on a prompt's bytes keeps
near. Its place is free again once the thread is gone.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from transformers import PreTrainedTokenizerBase

from meshrl.wire.errors import MeshError, Reason

LOOK_S = 0.05

Result = TypeVar("Result")
Work = Callable[[PreTrainedTokenizerBase], Result]
_Ended = tuple[PreTrainedTokenizerBase | None, Result | None, Exception | None]
"""The copy of the tokenizer, where one was made, and the work's result or error."""


class _Overrun(BaseException):
    """Raised inside a thread that has to end; no `except Exception` of a library keeps it."""


class TokenizerPool:
    """Runs work that needs a tokenizer to itself: at most `workers` at once, each for at most `limit_s`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, workers: int, limit_s: float) -> None:
        self._original = tokenizer
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(workers)
        self._free: list[PreTrainedTokenizerBase] = []
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, work: Work[Result]) -> Result:
        """Waits for a place (the request's deadline bounds that) and returns what `work` does.

        Raises: MeshError INVALID_REQUEST when the work took too long, and whatever `work` raises.
        """
        await self._places.acquire()
        tokenizer = self._free.pop() if self._free else None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Ended[Result]] = loop.create_future()
        thread = threading.Thread(target=self._work, args=(work, tokenizer, loop, done), daemon=True, name="tokenizer")
        try:
            thread.start()
        except RuntimeError:  # this system gives no more threads
            self._places.release()
            raise
        try:
            used, result, error = await asyncio.wait_for(asyncio.shield(done), self._limit_s)
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
        if used is not None:
            self._free.append(used)
        if error is not None:
            raise error
        return cast("Result", result)

    def _work(
        self, work: Work[Result], tokenizer: PreTrainedTokenizerBase | None, loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[_Ended[Result]],
    ) -> None:  # fmt: skip
        with suppress(_Overrun):  # nobody waits for the result any more
            used = tokenizer
            result: Result | None = None
            failure: Exception | None = None
            try:
                used = copy.deepcopy(self._original) if used is None else used
                result = work(used)
            except Exception as error:  # noqa: BLE001 - belongs to whoever waits
                failure = error

            def answer() -> None:
                if not done.done():
                    done.set_result((used, result, failure))

            with suppress(RuntimeError):  # the loop is closed: the program ends
                loop.call_soon_threadsafe(answer)

    async def _end(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Overrun))
            await asyncio.sleep(LOOK_S)
        self._places.release()
