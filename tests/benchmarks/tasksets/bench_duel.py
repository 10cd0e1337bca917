"""Two agents of the benchmark play a number game by self-play: both are the policy, both train, rewards sum to one."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


class DuelTask(vf.Task[vf.TaskData]):
    pass


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield DuelTask(vf.TaskData(prompt=f"Write more vowels than the other. Round {number}."), self.config.task)


class DuelEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelEnvConfig]):
    """Two turns each; the second player sees what the first one wrote, and the first one the answer."""

    async def run(self, task, agents):
        answering = type(task)(task.data.model_copy(update={"prompt": None}), task.config)  # the first one opens
        async with agents.first.interaction(task) as first, agents.second.interaction(answering) as second:
            said = await first.turn()
            for _ in range(2):
                if said.terminated:
                    break
                answer = await second.turn(said.last_reply or "nothing")
                if answer.terminated:
                    break
                said = await first.turn(answer.last_reply or "nothing")

    async def finalize(self, task, episode):
        vowels = {trace.agent.name: sum(letter in "aeiou" for letter in trace.transcript) for trace in episode.traces}
        total = sum(vowels.values())
        for trace in episode.traces:
            share = vowels[trace.agent.name] / total if total else 0.5
            trace.record_reward("share", share, 1.0)
