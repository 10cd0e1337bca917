"""The nim taskset and the environment that keeps the heap."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Literal

import verifiers.v1 as vf

from meshrl_examples.words import Split

from .game import SYSTEM_PROMPT, heaps, moves, read_move, right_move


class NimData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    """What a game begins with, and against whom it is."""

    heap: int
    against: Literal["itself", "expert"]


class NimTask(vf.Task[NimData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Take the last match. The environment records the reward: 1 for who wins, 0 for who loses."""


class NimConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which games to load."""

    split: Split = "train"
    """train, or games that the first player can win, for evaluations."""

    against: Literal["itself", "expert"] = "itself"
    """itself: the policy plays both sides; expert: it plays the first, against a player that makes no mistake."""


class NimTaskset(vf.Taskset[NimTask, NimConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Heaps of matches."""

    def load(self) -> Iterable[NimTask]:
        for index, heap in enumerate(heaps(self.config.split)):
            data = NimData(idx=index, system_prompt=SYSTEM_PROMPT, heap=heap, against=self.config.against)
            yield NimTask(data, self.config.task)


class NimEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Who plays."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class NimEnv(vf.Env[NimEnvConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The player in turn reads how many matches are left, and replies with the number to take; any other reply
    loses."""

    async def run(self, task: NimTask, agents: vf.Agents) -> None:
        heap, mover, winner = task.data.heap, 0, None
        expert = random.Random(heap) if task.data.against == "expert" else None
        playing: dict[int, vf.Interaction] = {}
        right, chances = [0, 0], [0, 0]
        async with AsyncExitStack() as stack:
            while winner is None:
                if mover == 1 and expert is not None:
                    taken = right_move(heap) or expert.choice(moves(heap))
                else:
                    if mover not in playing:
                        seat = (agents.first, agents.second)[mover]
                        playing[mover] = await stack.enter_async_context(seat.interaction(task))
                    segment = await playing[mover].turn(str(heap))
                    move = read_move(segment.last_reply or "", heap)
                    chances[mover] += right_move(heap) is not None
                    right[mover] += move is not None and move == right_move(heap)
                    if move is None:
                        winner = 1 - mover
                        break
                    taken = move
                heap -= taken
                if heap == 0:
                    winner = mover
                mover = 1 - mover
        for number, interaction in playing.items():
            interaction.trace.record_reward("won", float(number == winner), 1.0)
            interaction.trace.record_metric("illegal", float(heap > 0 and number != winner))
            if chances[number]:
                interaction.trace.record_metric("right_moves", right[number] / chances[number])
