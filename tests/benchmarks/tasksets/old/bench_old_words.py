"""Environments of the older verifiers API: copy a word, guess a number in turns, and be compared with one's group."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

WORDS = ("cat", "house", "tree", "river", "stone")


def load_environment(kind: str = "copy", tasks: int = 50) -> vf.Environment:
    """`kind` is copy (single-turn), turns (multi-turn) or compared (rewards of a group)."""
    words = [WORDS[index % len(WORDS)] for index in range(tasks)]
    rows = {"question": [f"copy {word}" for word in words], "answer": words}
    made = {"dataset": Dataset.from_dict(rows), "system_prompt": "Copy the word."}
    if kind == "turns":
        return ThreeTurns(rubric=vf.Rubric(funcs=[similar, turns], weights=[1.0, 0.0]), max_turns=3, **made)
    funcs = [shortest] if kind == "compared" else [similar, length]
    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=funcs, weights=[1.0, 0.0][: len(funcs)]), **made)


class ThreeTurns(vf.MultiTurnEnv):
    """Says "again" twice."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="again")]


def _reply(completion) -> str:
    last = completion[-1] if completion else {"content": ""}
    return str(last["content"] or "")


def similar(completion, answer, **kwargs) -> float:
    """Share of the word's letters that the reply has."""
    reply = _reply(completion)
    return sum(letter in reply for letter in answer) / len(answer)


def length(completion, **kwargs) -> float:
    return float(len(_reply(completion)))


def turns(state, **kwargs) -> float:
    return float(len(state["trajectory"]))


def shortest(completions, **kwargs) -> list[float]:
    """1 for the shortest replies of the group."""
    lengths = [len(_reply(completion)) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]
