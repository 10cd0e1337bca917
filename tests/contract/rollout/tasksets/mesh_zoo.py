"""Single-turn taskset whose rewards go wrong in the way that `kind` names; with `every`, in one task of so many."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time

import verifiers.v1 as vf

__all__ = ["ZooTaskset"]

_HELD: list[bytearray] = []


async def go_wrong(kind: str, seconds: float) -> object:
    """What a reward does instead of returning a number."""
    match kind:
        case "raises":
            raise RuntimeError("this reward is broken")
        case "nan":
            return math.nan
        case "enormous":
            return 1e308  # the mean of two is infinite
        case "none":
            return None
        case "text":
            return "very good"
        case "blocks":
            time.sleep(seconds)  # noqa: ASYNC251  # code that blocks is what is shown
        case "spins":  # holds the interpreter's lock: a search that backtracks
            import re

            re.match(r"(a+)+$", "a" * 64 + "b")
        case "hangs":
            await asyncio.Event().wait()
        case "slow":
            await asyncio.sleep(seconds)
        case "dies":
            os._exit(7)
        case "leaves" | "keeps":  # a program in a session of its own
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            left = await asyncio.create_subprocess_exec(*sleep, start_new_session=True)
            print(f"left process {left.pid}", flush=True)
            if kind == "leaves":
                os._exit(7)
            await asyncio.sleep(seconds)
        case "exits":
            sys.exit("no more")
        case "exits in a task":
            await asyncio.create_task(_exit())
        case "cancels":
            raise asyncio.CancelledError
        case "grows":
            for _ in range(48):
                _HELD.append(bytearray(b"x") * (64 << 20))
                await asyncio.sleep(0.02)
        case "huge":
            _HELD.append(bytearray(3 << 30))
    return 1.0


async def _exit() -> None:
    sys.exit("no more, from a task")


class ZooData(vf.TaskData):
    kind: str = ""
    seconds: float = 20.0


class ZooTask(vf.Task[ZooData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print(f"scoring {self.data.kind or 'well'}")
        return await go_wrong(self.data.kind, self.data.seconds)


class PlainTask(ZooTask):
    @vf.reward
    def right(self) -> float:
        return 1.0


class ZooConfig(vf.TasksetConfig):
    kind: str = ""
    every: int = 1
    seconds: float = 20.0
    tasks: int = 1000


class ZooTaskset(vf.Taskset[ZooTask, ZooConfig]):
    def load(self):
        config = self.config
        for index in range(config.tasks):
            kind = config.kind if index % config.every == 0 else ""
            task = PlainTask if kind == "plain" else ZooTask
            yield task(ZooData(prompt=f"task {index}", kind=kind, seconds=config.seconds), config.task)
