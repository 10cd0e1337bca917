"""A rank for the tests of the agent: meets the others over gloo, then lives until rank 0 is told to end.

Arguments: a folder for its pid; "early" makes rank 1 fail before it meets the others. Rank 0 waits first, for longer
than a collective may take.
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from meshrl.core.heap import loading

if sys.argv[2] == "early" and os.environ["RANK"] == "1":
    sys.exit("rank 1 has a problem")

with loading():
    import torch
    import torch.distributed as dist

    from meshrl.training.parallel.lifeline import Lifeline
    from meshrl.training.parallel.rank_group import RankGroup

TIMEOUT_S = 4


def main(folder: Path) -> None:
    if os.environ["RANK"] == "0":
        with loading():  # transformers, too, which takes seconds
            from meshrl.trainer.ranks.commands import CommandSender

    dist.init_process_group("gloo")  # the ranks meet, however long that takes on a busy machine
    group = RankGroup.start(os.environ, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    lifeline = Lifeline.tie(group, os.environ)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: told.append(signum))
    (folder / f"{group.rank}.pid").write_text(str(os.getpid()))
    if group.rank == 0:
        future: Future[None] = Future()
        threading.Timer(1.5 * TIMEOUT_S, future.set_result, [None]).start()
        CommandSender(group, heartbeat_s=0.5).wait(future)
    while group.broadcast((b"stop" if told else b"go") if group.rank == 0 else None) != b"stop":
        time.sleep(0.02)
    group.barrier()
    lifeline.release()
    group.close()
    print(f"rank {group.rank} left, told {len(told)} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
