"""Stops the programs of a run that goes on, one after the other, and measures how soon `meshrl status` names each.

    python tests/benchmarks/bench_stalls.py outputs/mine

A program is stopped with SIGSTOP, as one that hangs in the kernel, and goes on once it is named.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from meshrl.wire.program_state import read_states, run_line

MOST_S = 60.0
BETWEEN_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    states = read_states(given.run)
    unnamed = 0
    print("| stopped | named after | status said |\n|---|---|---|")
    for program in sorted(states):
        pid = states[program].pid
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            while f"{program} is stopped" not in (line := run_line(read_states(given.run), time.time())):
                if time.monotonic() - stopped_s > MOST_S:
                    unnamed += 1
                    break
                time.sleep(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        print(f"| {program} | {time.monotonic() - stopped_s:.1f} s | {line} |", flush=True)
        time.sleep(BETWEEN_S)
    return unnamed


if __name__ == "__main__":
    sys.exit(main())
