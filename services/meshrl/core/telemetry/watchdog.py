"""Watches one program's waits and event loop from a thread of its own.

Every two seconds it writes `state/PROGRAM.json` in the run's folder. An overdue wait is logged with the chain of which
program waits for which, and again after twice as long. A program that is gone, stopped or stuck is reported by its
waiters and the orchestrator, a late event loop once a minute at most.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from loguru import logger

from meshrl.core.paths import is_gone
from meshrl.core.telemetry.waits import Waits
from meshrl.wire.program_state import FOLDER, ProgramState, WaitState, read_states, troubles_for, waiting_chain

LOOK_EVERY_S = 1.0
WRITE_EVERY_S = 2.0
LATE_S = 1.0
SAY_LATE_EVERY_S = 60.0
OVERSEER = "orchestrator"
"""It reports the troubles of all others: a person looks at its log."""


class ProgramWatch:
    """`start` it on the program's event loop, `stop` it there at the end. `output_dir` None writes nothing."""

    def __init__(
        self, program: str, waits: Waits, output_dir: Path | None, *, on_lost_folder: Callable[[], None] | None = None
    ) -> None:
        """`on_lost_folder` is called once on the event loop when output_dir is deleted or moved."""
        self._program = program
        self._waits = waits
        self._output_dir = output_dir
        self._path = None if output_dir is None else output_dir / FOLDER / f"{program}.json"
        self._on_lost_folder = on_lost_folder
        self._folder_made = False
        self._missed = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_s: float | None = None  # when the loop was asked for the answer that it owes
        self._found: tuple[WaitState, ...] = ()
        self._most_lag_s = 0.0  # since the last state that was written
        self._said_s: dict[str, float] = {}  # how long each overdue wait had lasted when it was said, by its name
        self._late_said_s = float("-inf")
        self._troubled: set[str] = set()  # of whom it was said
        self._began_s = time.time()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=LOOK_EVERY_S)
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def state(self) -> ProgramState:
        asked_s = self._asked_s
        stuck_s = 0.0 if asked_s is None else time.monotonic() - asked_s
        return ProgramState(
            program=self._program,
            host=socket.gethostname(),
            pid=os.getpid(),
            at_s=time.time(),
            loop_lag_s=round(max(self._most_lag_s, stuck_s), 3),
            stuck_s=round(stuck_s, 3),
            serves=self._waits.serves,
            waits=self._found,
        )

    # --- on the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        written_s = float("-inf")
        while not self._ended.wait(LOOK_EVERY_S):
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(self._answer)  # type: ignore[union-attr]  # it was started
                except RuntimeError:  # the loop is closed: the program ends
                    return
            if time.monotonic() - written_s >= WRITE_EVERY_S:
                written_s = time.monotonic()
                self._look()

    def _look(self) -> None:
        state = self.state()
        self._most_lag_s = 0.0
        if state.loop_lag_s > LATE_S and time.monotonic() - self._late_said_s > SAY_LATE_EVERY_S:
            self._late_said_s = time.monotonic()
            logger.warning(
                "the event loop of {} answered {:.1f} s late: something blocks it, or the machine is too busy",
                self._program, state.loop_lag_s,
            )  # fmt: skip
        if not self._misses_folder():
            self._write(state)
        self._say_troubles(state)
        late = {wait.name: wait for wait in state.waits if wait.overdue and not wait.reported}
        self._said_s = {name: said_s for name, said_s in self._said_s.items() if name in late}
        for name, wait in late.items():
            if wait.seconds >= 2 * self._said_s.get(name, 0.0):
                self._said_s[name] = wait.seconds
                others = {} if self._output_dir is None else read_states(self._output_dir)
                states = {**others, self._program: replace(state, waits=(wait,))}
                usual = "" if wait.usual_s is None else f" (usually {wait.usual_s:.1f} s)"
                chain = waiting_chain(states, self._program, state.at_s).removeprefix(f"{self._program} waits for ")
                logger.info("waiting for {:.0f} s{}: {}", wait.seconds, usual, chain)

    def _misses_folder(self) -> bool:
        if not self._folder_made or self._output_dir is None or not is_gone(self._output_dir):
            self._missed = 0
            return False
        self._missed += 1
        if self._missed < 2:
            return True
        self._folder_made = False  # from now on it is made anew
        if self._on_lost_folder is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the program ends
                self._loop.call_soon_threadsafe(self._on_lost_folder)
        return False

    def _say_troubles(self, state: ProgramState) -> None:
        if self._output_dir is None:
            return
        others = read_states(self._output_dir)
        current = {name: other for name, other in others.items() if other.at_s > self._began_s}  # of this run
        self._waits.lags_s = {name: other.loop_lag_s for name, other in current.items()}
        found = troubles_for(state, current, every=self._program == OVERSEER)
        for name in sorted(found.keys() - self._troubled):
            logger.warning("{} {}", name, found[name])
        for name in sorted((self._troubled - found.keys()) & current.keys()):
            logger.info("{} works again", name)
        self._troubled = set(found)

    def _write(self, state: ProgramState) -> None:
        if self._path is None or self._output_dir is None:
            return
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # a full disk: what it says is that, in the log of whoever needs the room
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(state.to_json())
            part.replace(self._path)
            self._folder_made = True

    # --- on the event loop ----------------------------------------------------------------------

    def _answer(self) -> None:
        asked_s, self._asked_s = self._asked_s, None
        if asked_s is not None:
            self._most_lag_s = max(self._most_lag_s, time.monotonic() - asked_s)
        self._found = self._waits.look(time.time())
