"""Multi-turn taskset of the tests: the environment is the user and asks `turns` times."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    turns: int = 3


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return trace.num_turns / self.data.turns


class GuessConfig(vf.TasksetConfig):
    turns: int = 3


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        yield GuessTask(GuessData(prompt="q0", turns=self.config.turns), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            for number in range(1, task.data.turns):
                if segment.terminated:
                    break
                segment = await player.turn(f"q{number}")
