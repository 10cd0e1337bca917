"""The ranks that bring a version out, beside training: rank 0's publisher says what to do, each does its share.

Every rank has one worker and works on a thread of its own. Rank 0's words and the others' answers are JSON in a TCP
store, so nothing here meets the collectives of a step. A failure of one share fails the word for rank 0.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from loguru import logger
from torch._C._distributed_c10d import Store

from meshrl.trainer.publishing.progress import Progress
from meshrl.wire.errors import MeshError, Reason

Word = Mapping[str, Any]
LOOK_S = (0.001, 0.05)  # between two looks for an answer, doubled from the first to the second
TELL_S = 0.5
IDLE_S = 3600.0  # a member that hears nothing listens again; it ends with the store
END = "end"


class Worker(Protocol):
    """One rank's share of a publication; `progress` says whether it moves."""

    progress: Progress

    def work(self, word: Word) -> dict[str, Any]:
        """Does what a word asks for; blocking. Raises MeshError and OSError."""


class Crew:
    """Rank 0's side; one word at a time, from one thread at a time. `store` is None in a crew of one."""

    def __init__(self, own: Worker, store: Store | None, *, size: int) -> None:
        assert store is not None or size == 1, "a crew of several ranks needs a store"
        self.own, self.size = own, size
        self._store = store
        self._said = 0

    def work(self, word: Word, *, stall_s: float) -> list[dict[str, Any]]:
        """Has every rank do a word; returns their answers in order. Raises MeshError, the first one's that failed.

        A rank may take as long as its share moves, and stand still for `stall_s`.
        """
        number = self._say(word)
        failure: MeshError | OSError | None = None
        answers: list[dict[str, Any]] = []
        try:
            answers.append(self.own.work(word))
        except (MeshError, OSError) as error:  # the others do their shares all the same, and are heard out
            failure = error
        for rank in range(1, self.size):
            answer = self._hear(number, rank, stall_s)
            if "reason" in answer and failure is None:
                failure = MeshError(Reason[answer["reason"]], f"rank {rank}: {answer['message']}")
            answers.append(answer)
        if failure is not None:
            raise failure
        return answers

    def end(self) -> None:
        """Sends the others home."""
        self._say({"do": END})

    def _say(self, word: Word) -> int:
        self._said += 1
        if self._store is not None and self.size > 1:
            self._store.delete_key(f"word/{self._said - 2}")  # everybody has read it: the one after it was answered
            self._store.set(f"word/{self._said}", json.dumps(word))
        return self._said

    def _hear(self, number: int, rank: int, stall_s: float) -> dict[str, Any]:
        assert self._store is not None
        key, moved, seen = f"answer/{number}/{rank}", f"moved/{number}/{rank}", b""
        end_s, pause_s = time.monotonic() + stall_s, LOOK_S[0]
        try:
            while not self._store.check([key]):  # not `wait`, of which torch writes a warning whenever it ends in vain
                if self._store.check([moved]) and (found := self._store.get(moved)) != seen:
                    seen, end_s = found, time.monotonic() + stall_s
                    self.own.progress.moved()
                if time.monotonic() >= end_s:
                    text = f"rank {rank} of the trainer did nothing of its share for {stall_s:g} s"
                    raise MeshError(Reason.DEADLINE_PASSED, text)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S[1])
            answer: dict[str, Any] = json.loads(self._store.get(key))
            for over in (key, moved):
                self._store.delete_key(over)
        except RuntimeError as error:  # torch's: the store is gone
            raise MeshError(Reason.DEADLINE_PASSED, f"rank {rank} of the trainer cannot be heard: {error}") from error
        return answer


class CrewMember:
    """A rank but the first: a thread that does what rank 0's publisher says."""

    def __init__(self, worker: Worker, store: Store, *, rank: int) -> None:
        self._worker, self._store, self._rank = worker, store, rank
        self._working = ThreadPoolExecutor(1, thread_name_prefix="publishing-share")  # the GPU belongs to a thread
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def join(self, deadline_s: float) -> None:
        """Waits for the end that rank 0 says."""
        self._thread.join(deadline_s)

    def _run(self) -> None:
        number = 0
        while (word := self._next(number + 1)) is not None:
            number += 1
            try:
                answer = self._work(number, word)
            except MeshError as error:  # rank 0 decides what becomes of the version
                answer = {"reason": error.reason.name, "message": error.message}
            except Exception as error:  # noqa: BLE001  # whatever it was, rank 0 must hear of it, or it would wait
                logger.exception("this rank's share of a publication failed")
                answer = {"reason": Reason.INTERNAL.name, "message": repr(error)}
            try:
                self._store.set(f"answer/{number}/{self._rank}", json.dumps(answer))
            except RuntimeError:  # rank 0 is gone, and its training group with it
                return

    def _work(self, number: int, word: Word) -> dict[str, Any]:
        """Does a word and tells rank 0 meanwhile whenever it has come further."""
        working, told_s = self._working.submit(self._worker.work, word), self._worker.progress.moved_s
        while not futures.wait([working], TELL_S).done:
            moved_s = self._worker.progress.moved_s
            if moved_s != told_s:
                with suppress(RuntimeError):  # rank 0 is gone, which shows when the word is answered
                    self._store.set(f"moved/{number}/{self._rank}", str(moved_s))
                told_s = moved_s
        return working.result()

    def _next(self, number: int) -> Word | None:
        while True:
            try:
                self._store.wait([f"word/{number}"], timedelta(seconds=IDLE_S))
                word: dict[str, Any] = json.loads(self._store.get(f"word/{number}"))
            except RuntimeError as error:
                if "timeout" in str(error).lower():
                    continue
                return None  # rank 0 is gone, and its training group with it
            return None if word["do"] == END else word


class Held:
    """The newest snapshot of a rank: laid down by its training thread, picked up by its publishing thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._snapshot: Any = None

    def put(self, version: int, snapshot: Any) -> None:
        with self._changed:
            self._version, self._snapshot = version, snapshot
            self._changed.notify_all()

    def drop(self) -> Any:
        """Lets go of the snapshot, so that nobody picks it up any more, and returns it."""
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
            return snapshot

    def get(self, version: int, *, deadline_s: float) -> Any:
        """The snapshot of a version, once it is there. Raises MeshError VERSION_SUPERSEDED or DEADLINE_PASSED."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._version > version or (self._version == version and self._snapshot is not None),
                deadline_s,
            )
            if self._version == version and self._snapshot is not None:
                return self._snapshot
        if found:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"this rank already has version {self._version}")
        raise MeshError(Reason.DEADLINE_PASSED, f"this rank has no version {version} after {deadline_s:g} s")


def answers_by(key: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the tables that several ranks answered under a key."""
    return {name: value for answer in answers for name, value in answer[key].items()}
