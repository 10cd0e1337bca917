"""The memory_game taskset and the environment that plays its user."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from meshrl_examples.similarity import similarity
from meshrl_examples.words import Split

from .game import ROUNDS, SYSTEM_PROMPT, games, right_reply


class MemoryGameData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    words: list[str]

    def score(self, replies: list[str]) -> float:
        """Mean closeness over the turns, 0 to 1; a turn without a reply counts 0."""
        rights = [right_reply(self.words[: number + 1]) for number in range(ROUNDS)]
        return sum(similarity(reply, right) for reply, right in zip(replies, rights, strict=False)) / ROUNDS


class MemoryGameTask(vf.Task[MemoryGameData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Repeat every word of the game so far, each turn anew."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def closeness(self, trace: vf.Trace) -> float:
        score: float = self.data.score([message.content or "" for message in trace.assistant_messages])
        return score

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def exact(self, trace: vf.Trace) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        return float(replies == [right_reply(self.data.words[: number + 1]) for number in range(ROUNDS)])


class MemoryGameConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which games to load."""

    split: Split = "train"
    """train, or games with words that training never names."""


class MemoryGameTaskset(vf.Taskset[MemoryGameTask, MemoryGameConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Games of three words."""

    def load(self) -> Iterable[MemoryGameTask]:
        for index, words in enumerate(games(self.config.split)):
            data = MemoryGameData(idx=index, prompt=words[0], system_prompt=SYSTEM_PROMPT, words=words)
            yield MemoryGameTask(data, self.config.task)


class MemoryGameEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The one agent of the game."""

    player: vf.AgentConfig = vf.AgentConfig()


class MemoryGameEnv(vf.Env[MemoryGameEnvConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Plays the user: names a word each turn, after any reply."""

    async def run(self, task: MemoryGameTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            for word in task.data.words[1:]:
                if segment.terminated:
                    return
                segment = await player.turn(word)
