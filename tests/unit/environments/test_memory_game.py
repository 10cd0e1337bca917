"""The memory game: its tasks, its score and its demonstrations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from meshrl.environments.memory_game import demonstrations as game_demonstrations
from meshrl.environments.memory_game.game import games, right_reply
from meshrl.environments.memory_game.taskset import MemoryGameData

from conversations import load_conversations
from meshrl.algorithms.packing import TrainSample
from meshrl.sft.config import DataConfig
from meshrl.sft.data.tokenization import ConversationTokenizer
from meshrl_examples.demonstrations import write_demonstrations
from meshrl_examples.model import create_tokenizer
from meshrl_examples.words import every_word, words_of

TOKENIZER = create_tokenizer()


def test_words_of_the_splits_are_disjoint_and_all_different() -> None:
    train, held_out = words_of("train"), words_of("held_out")
    assert sorted([*train, *held_out]) == sorted(set(every_word()))
    assert (len(train), len(held_out)) == (592, 128)


def test_games_of_a_split_name_its_words_only_and_no_word_twice() -> None:
    for split, count in (("train", 1536), ("held_out", 128)):
        known, played = set(words_of(split)), games(split)
        assert len(played) == count
        assert all(len(set(words)) == 3 and set(words) <= known for words in played)


@pytest.mark.parametrize(
    ("replies", "score"),
    [
        (["a", "a b", "a b c"], 1.0),
        (["a", "b", "c"], (1 + 2 / 4 + 2 / 6) / 3),
        (["a", "a b"], 2 / 3),
        (["x", "", "a b c", "a b c d"], 1 / 3),
        ([], 0.0),
    ],
)
def test_a_game_is_scored_by_how_close_each_reply_comes(replies: list[str], score: float) -> None:
    data = MemoryGameData(idx=0, prompt="a", words=["a", "b", "c"])
    assert data.score(replies) == pytest.approx(score)


def test_demonstrations_show_the_rewarded_way_at_the_given_rate() -> None:
    played = list(game_demonstrations.demonstrations(games("train"), share=0.3, source=random.Random(0)))
    right = [
        row["messages"][-1]["content"] == right_reply(words) for row, words in zip(played, games("train"), strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(0.3, abs=0.04)


def learned(sample: TrainSample) -> str:
    return TOKENIZER.decode(sample.token_ids[sample.loss_mask])


def test_what_is_learned_of_the_demonstrations_is_what_the_policy_has_to_say(tmp_path: Path) -> None:
    write_demonstrations(game_demonstrations.rows, tmp_path / "game", share=0.3, seed=1)
    roles = frozenset({"assistant"})
    row = load_conversations(DataConfig(name=str(tmp_path / "game" / "val.jsonl")))[0]
    a, b, c = games("held_out")[0]
    assert learned(ConversationTokenizer(TOKENIZER, None, learned_roles=roles)(row)) == (
        f"{a}<|im_end|>{a} {b}<|im_end|>{a} {b} {c}<|im_end|>"
    )
