"""The word trail: its tasks, its tool and its demonstrations."""

from __future__ import annotations

import random
from collections import Counter

from meshrl.environments.word_trail.demonstrations import TOOL, conversation, demonstrations
from meshrl.environments.word_trail.trail import Trail, trails, word_after

from meshrl_examples.model import create_tokenizer
from meshrl_examples.words import every_word, words_of


def test_the_trail_visits_every_word_once_and_comes_back() -> None:
    word = start = every_word()[0]
    seen = []
    for _ in every_word():
        seen.append(word)
        word = word_after(word)
    assert word == start
    assert sorted(seen) == sorted(every_word())
    assert Trail(start, 2).words == [start, word_after(start), word_after(word_after(start))]


def test_trails_of_the_splits_start_from_their_words() -> None:
    assert {trail.start for trail in trails("train")} == set(words_of("train"))
    assert [trail.start for trail in trails("held_out")] == words_of("held_out")
    assert {trail.steps for trail in trails("held_out")} == {1, 2, 3}


def test_the_first_trails_are_as_long_as_all_of_them() -> None:
    whole = trails("train")
    assert len(set(whole)) == len(whole) == 3 * len(words_of("train"))
    assert Counter(trail.steps for trail in whole[:99]) == {1: 33, 2: 33, 3: 33}
    assert len({trail.start for trail in whole[:99]}) == 99


def test_demonstrations_show_the_rewarded_way_at_the_given_rate() -> None:
    followed = list(demonstrations(trails("train"), share=0.3, source=random.Random(0)))
    steps_off = [
        sum(message["role"] == "tool" for message in row["messages"]) - trail.steps
        for row, trail in zip(followed, trails("train"), strict=True)
    ]
    assert set(steps_off) == {-1, 0, 1}
    assert abs(steps_off.count(0) / len(steps_off) - 0.3) < 0.04


def test_a_conversation_with_the_tool_is_short_in_the_tokens_of_the_examples_model() -> None:
    tokenizer = create_tokenizer(tool_calls=True)
    messages = conversation(Trail(words_of("held_out")[0], 3), 4)
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < 256  # seq_len of configs/word_trail; a token a byte would be four times as many
