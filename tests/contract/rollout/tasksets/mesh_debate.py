"""Two agents of the tests: both answer, a referee that does not train answers too."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class DebateTaskset(vf.Taskset[DebateTask, vf.TasksetConfig]):
    def load(self):
        yield DebateTask(vf.TaskData(prompt="topic"), self.config.task)


class DebateEnvConfig(vf.EnvConfig):
    pro: vf.AgentConfig = vf.AgentConfig()
    con: vf.AgentConfig = vf.AgentConfig()
    referee: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateEnvConfig]):
    async def setup(self, agents):
        agents.referee.trainable = False

    async def run(self, task, agents):
        await agents.pro.run(task)
        await agents.con.run(task)
        await agents.referee.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if trace.agent.name != "referee":
                trace.record_metric("rounds", 1.0)
