"""Words to write backwards, with what can be wrong with an environment: the `ailment` of its configuration.

constant   each reply earns the same
length     each reply earns more the longer it is
letter     each reply earns its share of the letter e, whatever was asked
hacked     a reply earns what is right, and three times as much what is long; the held-out split counts the former
slow       scoring takes seconds
failing    every third reply cannot be scored
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from meshrl.environments.reverse_text.sentences import SYSTEM_PROMPT, sentences

from meshrl_examples.similarity import similarity
from meshrl_examples.words import Split

__all__ = ["AilingWordsTaskset"]

LONG = 100
"""Characters of a reply that earns all that length can."""
SCORING_S = 2.0


Ailment = Literal["constant", "length", "letter", "hacked", "slow", "failing"]


class AilingWordsData(vf.TaskData):
    answer: str
    ailment: str


class AilingWordsTask(vf.Task[AilingWordsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        reply, ailment = trace.last_reply or "", self.data.ailment
        if ailment == "slow":
            await asyncio.sleep(SCORING_S)
        if ailment == "failing" and len(reply) % 3 == 0:
            raise ValueError("the reply cannot be scored")
        if ailment == "constant":
            return 0.5
        if ailment == "length":
            return min(1.0, len(reply) / LONG)
        if ailment == "letter":
            return reply.count("e") / max(8, len(reply))
        return similarity(reply, self.data.answer)

    @vf.reward(weight=3.0)
    async def fluent(self, trace: vf.Trace) -> float:
        if self.data.ailment != "hacked":
            return 0.0
        return min(1.0, len(trace.last_reply or "") / LONG)


class AilingWordsConfig(vf.TasksetConfig):
    split: Split = "train"
    ailment: Ailment


class AilingWordsTaskset(vf.Taskset[AilingWordsTask, AilingWordsConfig]):
    def load(self) -> Iterable[AilingWordsTask]:
        split, ailment = self.config.split, self.config.ailment
        shown = ailment if split == "train" or ailment != "hacked" else ""
        for index, text in enumerate(sentences(split)):
            about = {"idx": index, "prompt": text, "system_prompt": SYSTEM_PROMPT}
            yield AilingWordsTask(AilingWordsData(**about, answer=text[::-1], ailment=shown), self.config.task)
