"""The example task: its sentences, its score, and how verifiers finds it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshrl.environments.reverse_text.demonstrations import (
    demonstrations,
    repeated,
    rows,
    words_reversed,
)
from meshrl.environments.reverse_text.sentences import sentences

from meshrl_examples.demonstrations import write_demonstrations
from meshrl_examples.similarity import longest_common_subsequence, similarity

short_text = st.text(alphabet="abc ", max_size=8)


def test_splits_share_no_sentence_and_repeat_none() -> None:
    train, held_out = sentences("train"), sentences("held_out")
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train) >= 1500
    assert len(set(held_out)) == len(held_out) == 128


def test_sentences_suit_a_small_model() -> None:
    everything = sentences("train") + sentences("held_out")
    assert all(text.isascii() and text[0].isupper() and text.endswith(".") and " " in text for text in everything)
    assert 7 <= min(map(len, everything)) <= max(map(len, everything)) <= 24


@pytest.mark.parametrize(
    ("left", "right", "length"), [("", "abc", 0), ("abc", "abc", 3), ("abcbdab", "bdcaba", 4), ("ab", "ba", 1)]
)
def test_longest_common_subsequence_of_known_pairs(left: str, right: str, length: int) -> None:
    assert longest_common_subsequence(left, right) == length


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(short_text, short_text)
def test_similarity_is_symmetric_and_one_only_for_equal_texts(left: str, right: str) -> None:
    score = similarity(left, right)
    assert score == similarity(right, left)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (left == right)


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(short_text, st.data())
def test_a_text_with_letters_left_out_is_wholly_common(text: str, data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    part = "".join(letter for letter, keep in zip(text, kept, strict=True) if keep)
    assert longest_common_subsequence(part, text) == len(part)


def test_demonstrations_show_the_rewarded_reading_at_the_given_rate() -> None:
    texts = sentences("train")
    drawn = demonstrations(texts, share=0.3, source=random.Random(0))
    replies = [row["completion"][0]["content"] for row in drawn]
    right = [reply == text[::-1] for text, reply in zip(texts, replies, strict=True)]
    assert sum(right) / len(right) == pytest.approx(0.3, abs=0.04)
    others = [pair for pair, is_right in zip(zip(texts, replies, strict=True), right, strict=True) if not is_right]
    assert all(reply in (repeated(text), words_reversed(text)) for text, reply in others)


def test_validation_rows_are_held_out_and_right(tmp_path: Path) -> None:
    write_demonstrations(rows, tmp_path, share=0.3, seed=1)
    held_out = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    prompts = [row["prompt"][1]["content"] for row in held_out]
    assert prompts == sentences("held_out")
    assert [row["completion"][0]["content"] for row in held_out] == [prompt[::-1] for prompt in prompts]
    trained = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {row["prompt"][1]["content"] for row in trained} == set(sentences("train"))
