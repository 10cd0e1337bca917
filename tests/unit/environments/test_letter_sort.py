"""letter_sort: its tasks, its score and its demonstrations."""

from __future__ import annotations

import random

import pytest
from meshrl.environments.letter_sort.demonstrations import conversation, demonstrations
from meshrl.environments.letter_sort.letters import right_reply, tasks
from meshrl.environments.letter_sort.taskset import LetterSortData

NAMED = [["k", "d"], ["z", "a"], ["m", "b"]]


def test_no_letters_come_together_in_both_splits() -> None:
    sets = {
        split: [frozenset(letter for turn in named for letter in turn) for named in tasks(split)]
        for split in ("train", "held_out")
    }
    assert [len(sets["train"]), len(sets["held_out"])] == [1536, 128]
    assert not set(sets["train"]) & set(sets["held_out"])
    assert {len(letters) for letters in sets["train"]} == {6}


@pytest.mark.parametrize(
    ("replies", "score"),
    [
        (["d k", "a d k z", "a b d k m z"], 1.0),
        (["d k", "a d k z"], 2 / 3),
        (["k d", "", "a b d k m z"], (2 / 6 + 0 + 1) / 3),
        ([], 0.0),
    ],
)
def test_a_conversation_is_scored_by_how_close_each_reply_comes(replies: list[str], score: float) -> None:
    data = LetterSortData(idx=0, prompt="k d", named=NAMED)
    assert data.score(replies) == pytest.approx(score)


def test_a_demonstration_is_the_whole_conversation_in_one_order() -> None:
    said = [message["content"] for message in conversation(NAMED, right_reply)]
    assert said == ["Sort all letters.", "k d", "d k", "z a", "a d k z", "m b", "a b d k m z"]
    rows = list(demonstrations(tasks("train"), share=0.3, source=random.Random(0)))
    right = [
        row["messages"] == conversation(named, right_reply) for row, named in zip(rows, tasks("train"), strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(0.3, abs=0.04)
