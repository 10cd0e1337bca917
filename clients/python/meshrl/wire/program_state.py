"""The state file of a program: its waits, and how late its event loop is.

Each program of a run writes `state/PROGRAM.json` every two seconds (`meshrl.core.telemetry.watchdog`); `meshrl status`
and the programs follow the waits from one to the next.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "state"
SILENT_AFTER_S = 10.0
"""Without a state for so long, a program is dead or stopped, or its machine is."""
STUCK_AFTER_S = 5.0
"""For so long without an answer of the event loop."""


@dataclass(frozen=True, kw_only=True)
class WaitState:
    """One wait, or several of a kind: `name` is the kind, `what` which one in words.

    `on`: the awaited programs, by state files or engines' URLs. `usual_s`: the median of ended waits of the kind.
    `overdue` is worth a line in the log; `reported` waits have a report of their own.
    """

    name: str
    what: str
    seconds: float
    on: tuple[str, ...] = ()
    usual_s: float | None = None
    overdue: bool = False
    reported: bool = False


@dataclass(frozen=True, kw_only=True)
class ProgramState:
    """`loop_lag_s`: the event loop's largest lag since the last state. `stuck_s`: its present silence. `serves`:
    addresses by which others may name it."""

    program: str
    host: str
    pid: int
    at_s: float
    loop_lag_s: float = 0.0
    stuck_s: float = 0.0
    serves: tuple[str, ...] = ()
    waits: tuple[WaitState, ...] = ()

    def trouble(self, now_s: float) -> str:
        silent_s = now_s - self.at_s
        letter = _process_state(self.pid) if self.host == socket.gethostname() else "?"
        if letter in ("", "Z"):
            return f"is gone: process {self.pid} ended {silent_s:.0f} s ago without saying so"
        if letter == "T":
            return f"is stopped: process {self.pid} got SIGSTOP, and kill -CONT {self.pid} lets it go on"
        if silent_s > SILENT_AFTER_S:
            return f"says nothing for {silent_s:.0f} s (process {self.pid} on {self.host})"
        if self.stuck_s > STUCK_AFTER_S:
            return f"answers nobody: its event loop is stuck for {self.stuck_s:.0f} s"
        return ""

    def longest(self) -> WaitState | None:
        return max(self.waits, key=lambda wait: (wait.overdue, wait.seconds), default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> ProgramState:
    """Raises ValueError for a text that is no program's state."""
    read = json.loads(text)
    try:
        waits = tuple(WaitState(**{**wait, "on": tuple(wait["on"])}) for wait in read["waits"])
        return ProgramState(**{**read, "waits": waits, "serves": tuple(read["serves"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the state of a program: {error}") from error


def read_states(output_dir: Path) -> dict[str, ProgramState]:
    """By the programs' names; a program that ended well has none."""
    states = {}
    for path in sorted((output_dir / FOLDER).glob("*.json")):
        try:
            state = from_json(path.read_text())
        except (OSError, ValueError):  # removed meanwhile, or by another release
            continue
        states[state.program] = state
    return states


def waiting_chain(states: Mapping[str, ProgramState], start: str, now_s: float) -> str:
    """Who waits for whom, from `start` on, in one sentence; "" when it waits for nothing. Ends at a program that does
    not wait, or is in trouble."""
    said: list[str] = []
    seen: set[str] = set()
    state = _find(states, start)
    while state is not None and state.program not in seen:
        seen.add(state.program)
        if trouble := state.trouble(now_s):
            said.append(f"{state.program} {trouble}")
            break
        wait = state.longest()
        if wait is None:
            break
        said.append(f"{state.program} waits for {wait.what}, {wait.seconds + now_s - state.at_s:.0f} s")
        state = _next(states, wait.on, now_s)
    return ": ".join(said)


def troubles_for(state: ProgramState, others: Mapping[str, ProgramState], *, every: bool) -> dict[str, str]:
    """Troubles of programs that `state` waits for, or of `every` other one, by their names."""
    awaited = {other.program for wait in state.waits for name in wait.on if (other := _find(others, name)) is not None}
    found = {name: other.trouble(state.at_s) for name, other in others.items() if every or name in awaited}
    return {name: trouble for name, trouble in found.items() if trouble and name != state.program}


def run_line(states: Mapping[str, ProgramState], now_s: float) -> str:
    """A run's wait: the chain from the trainer if it waits for a batch, else from the orchestrator, then other
    troubles."""
    trainer = states.get("trainer")
    trains = trainer is not None and not any(wait.name == "batch" for wait in trainer.waits)
    starts = ["orchestrator", "trainer"] if trains else ["trainer", "orchestrator"]
    said = next((chain for start in starts if (chain := waiting_chain(states, start, now_s))), "")
    beside = [f"{state.program} {trouble}" for state in states.values() if (trouble := state.trouble(now_s))]
    return "; ".join(part for part in [said, *(text for text in beside if text not in said)] if part)


def _find(states: Mapping[str, ProgramState], name: str) -> ProgramState | None:
    if name in states:
        return states[name]
    bare = name.removeprefix("http://").removeprefix("https://").rstrip("/").removesuffix("/v1")
    port = bare.rpartition(":")[2]
    anywhere = {f"{host}:{port}" for host in ("0.0.0.0", "[::]")}  # a name that others have for it
    found = [state for state in states.values() if bare in state.serves]
    return next(iter([*found, *(state for state in states.values() if anywhere & set(state.serves))]), None)


def _next(states: Mapping[str, ProgramState], names: tuple[str, ...], now_s: float) -> ProgramState | None:
    """The one in trouble, else waiting for longest."""
    found = [state for name in names if (state := _find(states, name)) is not None]

    def weight(state: ProgramState) -> tuple[bool, float]:
        longest = state.longest()
        return bool(state.trouble(now_s)), 0.0 if longest is None else longest.seconds

    return max(found, key=weight, default=None)


def _process_state(pid: int) -> str:
    """The kernel's letter for a process of this machine; "" for one that is gone, "?" where unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() or not is_alive(pid) else "?"
    except OSError:  # it ended while it was read
        return ""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
