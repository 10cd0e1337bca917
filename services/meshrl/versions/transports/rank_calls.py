"""Calls from rank 0's publisher to the publishing threads of the other sender ranks, while training goes on.

Calls and answers are JSON in a TCP store, so nothing here takes part in the collectives of a step.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from loguru import logger
from torch._C._distributed_c10d import Store

from meshrl.client.backoff import Backoff
from meshrl.versions.transports.base import Answer, PublishCall
from meshrl.versions.transports.shares import SenderShare
from meshrl.wire.errors import MeshError, Reason

POLL_S = (0.001, 0.05)  # between two looks for an answer, doubled from the first to the second
TELL_S = 0.5  # between two signs of progress to rank 0
IDLE_S = 3600.0  # a rank that receives nothing listens again; it ends with the store


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    answer: Answer = field(default_factory=dict)
    reason: str = ""
    message: str = ""


class RankCalls:
    """Rank 0's side; one call at a time. `store` is None where there are no other ranks."""

    def __init__(self, share: SenderShare, store: Store | None, *, num_ranks: int) -> None:
        assert store is not None or num_ranks == 1, "several ranks need a store"
        self._share, self._store, self._num_ranks = share, store, num_ranks
        self._sent = 0

    def call(self, call: PublishCall, *, stall_s: float) -> list[Answer]:
        """Has every rank carry a call out, which may stand still for `stall_s`; returns their answers in order.

        Raises the error of the first rank that failed.
        """
        self._sent += 1
        if self._store is not None and self._num_ranks > 1:
            self._store.delete_key(f"call/{self._sent - 2}")  # everybody has read it: the one after it was answered
            self._store.set(f"call/{self._sent}", json.dumps([type(call).__name__, asdict(call)]))
        failure: MeshError | OSError | None = None
        answers: list[Answer] = []
        try:
            answers.append(self._share.carry_out(call))
        except (MeshError, OSError) as error:  # the others do their shares all the same, and are heard out
            failure = error
        for rank in range(1, self._num_ranks):
            answer = self._receive(rank, stall_s)
            if isinstance(answer, MeshError):
                failure = failure or answer
            else:
                answers.append(answer)
        if failure is not None:
            raise failure
        return answers

    def _receive(self, rank: int, stall_s: float) -> Answer | MeshError:
        assert self._store is not None
        key, moved, seen = f"answer/{self._sent}/{rank}", f"moved/{self._sent}/{rank}", b""
        end_s, pause = time.monotonic() + stall_s, Backoff(*POLL_S, jitter=0.0)
        try:
            while not self._store.check([key]):  # not `wait`, of which torch writes a warning whenever it ends in vain
                if self._store.check([moved]) and (found := self._store.get(moved)) != seen:
                    seen, end_s = found, time.monotonic() + stall_s
                    self._share.progress.moved()
                if time.monotonic() >= end_s:
                    text = f"rank {rank} of the trainer did nothing of its share for {stall_s:g} s"
                    raise MeshError(Reason.DEADLINE_PASSED, text)
                time.sleep(pause.next_s())
            outcome = _Outcome(**json.loads(self._store.get(key)))
            for over in (key, moved):
                self._store.delete_key(over)
        except RuntimeError as error:  # torch's: the store is gone
            raise MeshError(Reason.DEADLINE_PASSED, f"rank {rank} of the trainer cannot be heard: {error}") from error
        if outcome.reason:
            return MeshError(Reason[outcome.reason], f"rank {rank}: {outcome.message}")
        return outcome.answer


class RankCallThread:
    """The thread of a sender rank but the first that carries out calls."""

    def __init__(self, share: SenderShare, store: Store, *, rank: int) -> None:
        self._share, self._store, self._rank = share, store, rank
        self._working = ThreadPoolExecutor(1, thread_name_prefix="publishing-share")  # the GPU belongs to a thread
        threading.Thread(target=self._run, name="publishing", daemon=True).start()

    def _run(self) -> None:
        number = 1
        while (call := self._receive(number)) is not None:
            try:
                outcome = _Outcome(answer=self._carry_out(number, call))
            except MeshError as error:  # rank 0 decides what becomes of the version
                outcome = _Outcome(reason=error.reason.name, message=error.message)
            except Exception as error:  # noqa: BLE001  # whatever it was, rank 0 must hear of it, or it would wait
                logger.exception("this rank's share of a publication failed")
                outcome = _Outcome(reason=Reason.INTERNAL.name, message=repr(error))
            try:
                self._store.set(f"answer/{number}/{self._rank}", json.dumps(asdict(outcome)))
            except RuntimeError:  # rank 0 is gone, and its training group with it
                return
            number += 1

    def _carry_out(self, number: int, call: PublishCall) -> Answer:
        working, told_s = self._working.submit(self._share.carry_out, call), self._share.progress.moved_s
        while not futures.wait([working], TELL_S).done:
            moved_s = self._share.progress.moved_s
            if moved_s != told_s:
                with suppress(RuntimeError):  # rank 0 is gone, which shows when the call is answered
                    self._store.set(f"moved/{number}/{self._rank}", str(moved_s))
                told_s = moved_s
        return working.result()

    def _receive(self, number: int) -> PublishCall | None:
        while True:
            try:
                self._store.wait([f"call/{number}"], timedelta(seconds=IDLE_S))
                name, fields = json.loads(self._store.get(f"call/{number}"))
                kinds = {kind.__name__: kind for kind in self._share.handlers}
                return kinds[name](**fields)
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    return None
