"""Ends the programs of a run when `rl` itself dies without a word; a process of its own beside it.

Started as a script, with the standard library alone, so that it is up in milliseconds. It reads lines from stdin:
`+PID` when rl has started a process group, `-PID` when that group is gone. At the end of stdin rl is dead: every group
left is asked to end, and after the grace killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

POLL_S = 0.05


def follow(lines: list[str], groups: set[int]) -> None:
    """Updates the set of living groups."""
    for line in lines:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))


def send(groups: set[int], signum: int) -> set[int]:
    """Signals process groups; returns those that still exist."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            continue
        except PermissionError:  # the number belongs to somebody else by now
            continue
        alive.add(group)
    return alive


def end(groups: set[int], grace_s: float) -> None:
    """Asks the groups to end, waits for up to `grace_s`, kills what is left."""
    alive = send(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = send(alive, 0)
    send(alive, signal.SIGKILL)


def main() -> None:
    """Runs until stdin ends; the only argument is the grace in seconds."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # outlives rl on purpose, and ends with its stdin
    groups: set[int] = set()
    for line in sys.stdin:
        follow([line], groups)
    end(groups, float(sys.argv[1]))


if __name__ == "__main__":
    main()
