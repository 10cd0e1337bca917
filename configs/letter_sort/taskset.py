"""The letter_sort taskset and the environment that plays its user."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from meshrl_examples.similarity import similarity
from meshrl_examples.words import Split

from .letters import SYSTEM_PROMPT, TURNS, Turns, right_reply, tasks


class LetterSortData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    named: Turns

    @property
    def rights(self) -> list[str]:
        return [right_reply(self.named[: number + 1]) for number in range(TURNS)]

    def score(self, replies: list[str]) -> float:
        """Mean closeness over the turns, 0 to 1; a turn without a reply counts 0."""
        return sum(similarity(reply, right) for reply, right in zip(replies, self.rights, strict=False)) / TURNS


class LetterSortTask(vf.Task[LetterSortData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """List every letter so far in alphabetical order, each turn anew."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def closeness(self, trace: vf.Trace) -> float:
        score: float = self.data.score([message.content or "" for message in trace.assistant_messages])
        return score

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def exact(self, trace: vf.Trace) -> float:
        return float([message.content or "" for message in trace.assistant_messages] == self.data.rights)


class LetterSortConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which tasks to load."""

    split: Split = "train"
    """train, or tasks of letters that come together in no task of training."""


class LetterSortTaskset(vf.Taskset[LetterSortTask, LetterSortConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Six letters each, two a turn."""

    def load(self) -> Iterable[LetterSortTask]:
        for index, named in enumerate(tasks(self.config.split)):
            data = LetterSortData(idx=index, prompt=" ".join(named[0]), system_prompt=SYSTEM_PROMPT, named=named)
            yield LetterSortTask(data, self.config.task)


class LetterSortEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The one agent."""

    sorter: vf.AgentConfig = vf.AgentConfig()


class LetterSortEnv(vf.Env[LetterSortEnvConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Plays the user: names two letters each turn, whatever is replied."""

    async def run(self, task: LetterSortTask, agents: vf.Agents) -> None:
        async with agents.sorter.interaction(task) as sorter:
            segment = await sorter.turn()
            for letters in task.data.named[1:]:
                if segment.terminated:
                    return
                segment = await sorter.turn(" ".join(letters))
