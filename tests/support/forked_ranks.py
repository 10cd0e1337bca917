"""Ranks that are forked from one process once everything is imported, which takes longest of what they do; a program.

    python forked_ranks.py RANKS[,RANKS...] PROGRAM.py ARGUMENT... [-- ARGUMENT...]

Runs the `main` of a program on so many ranks, as torchrun does, but without its agent; and on new ones, of the next
number if there is one, with the arguments behind each --.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from meshrl.core.heap import loading

with loading():
    import torch
    from loguru import logger
    from transformers.utils import logging

    from local_ports import free_port
    from meshrl.core.orphans import end_with_parent

DEADLINE_S = 600.0


def on_ranks(ranks: int, work: Callable[[], None]) -> None:
    """Runs `work` on forked ranks, with the variables of torchrun. Raises RuntimeError when one fails."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    members = [context.Process(target=_as_rank, args=(rank, ranks, port, work)) for rank in range(ranks)]
    for member in members:
        member.start()
    try:
        for member in members:
            member.join(DEADLINE_S)
            if member.exitcode != 0:
                raise RuntimeError(f"a rank of {ranks} ended with {member.exitcode}")
    finally:
        for member in members:
            member.kill()


def _as_rank(rank: int, ranks: int, port: int, work: Callable[[], None]) -> None:
    end_with_parent()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logger.remove()
    torch.set_num_threads(1)
    here = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        work()
    except BaseException:  # noqa: BLE001  # a forked process must never return into its parent's work
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch's threads end with it


if __name__ == "__main__":
    sys.stdin = None  # multiprocessing would close it, and rank 0 may read it
    counts, program, *arguments = sys.argv[1:]
    count, *more = map(int, counts.split(","))
    sys.path.insert(0, str(Path(program).parent))
    with loading():
        main = importlib.import_module(Path(program).stem).main
    while arguments:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        sys.argv, arguments = [program, *arguments[:end]], arguments[end + 1 :]
        on_ranks(count, main)
        count, *more = more or [count]
