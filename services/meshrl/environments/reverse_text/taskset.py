"""The reverse_text taskset for verifiers; hosted by the rollout service, which plays and scores its tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import verifiers.v1 as vf

from meshrl.environments.reverse_text.prompt import SYSTEM_PROMPT
from meshrl.environments.reverse_text.sentences import Split, sentences


def longest_common_subsequence(left: str, right: str) -> int:
    """Length of the longest sequence of characters that both strings contain in order (not necessarily adjacent).

    A row of the usual table is a number with a bit for each character of `right`, 0 where the row grows, so that a
    row takes one addition (Hyyro 2004, "Bit-parallel LCS-length computation revisited", figure 2).
    """
    places: defaultdict[str, int] = defaultdict(int)
    for column, character in enumerate(right):
        places[character] |= 1 << column
    every = row = (1 << len(right)) - 1
    for character in left:
        here = row & places.get(character, 0)
        row = (row + here | row - here) & every
    return len(right) - row.bit_count()


def similarity(reply: str, answer: str) -> float:
    """2 * LCS / (len(reply) + len(answer)): 1 for equal strings, 0 for strings without a common character."""
    total = len(reply) + len(answer)
    return 2 * longest_common_subsequence(reply, answer) / total if total else 1.0


class ReverseTextData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    """One sentence and its reverse."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Reply with the user's text written backwards."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def lcs_ratio(self, trace: vf.Trace) -> float:
        """Similarity of the reply to the reversed text, 0 to 1."""
        return similarity(trace.last_reply or "", self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def exact(self, trace: vf.Trace) -> float:
        """1 for a perfect reply."""
        return float(trace.last_reply == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which sentences to load."""

    split: Split = "train"
    """train, or the held-out sentences that training never sees."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Short English sentences to write backwards."""

    def load(self) -> Iterable[ReverseTextTask]:
        for index, text in enumerate(sentences(self.config.split)):
            data = ReverseTextData(idx=index, prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1])
            yield ReverseTextTask(data, self.config.task)
