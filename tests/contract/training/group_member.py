"""A rank for the tests of the agent: meets the others over gloo, then lives until rank 0 is told to end.

Arguments: a folder for its pid; "early" makes rank 1 fail before it meets the others.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from meshrl.training.lifeline import Lifeline
from meshrl.training.parallel import ParallelContext


def main(folder: Path, mode: str) -> None:
    if mode == "early" and os.environ["RANK"] == "1":
        sys.exit("rank 1 has a problem")
    group = ParallelContext.start(os.environ, device=torch.device("cpu"), timeout_s=60)
    lifeline = Lifeline.tie(group, os.environ)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: told.append(signum))
    (folder / f"{group.rank}.pid").write_text(str(os.getpid()))
    while group.broadcast((b"stop" if told else b"go") if group.rank == 0 else None) == b"go":
        time.sleep(0.02)
    group.barrier()
    lifeline.release()
    group.close()
    print(f"rank {group.rank} left, told {len(told)} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
