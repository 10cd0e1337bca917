"""The table of docs/training.md on what a row may hold: each of its lines, tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatml_tokenizer import chatml_tokenizer
from meshrl.sft.config import DataConfig, SFTConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.loader import TokenizedRows
from meshrl.sft.data.mixture import Cursor, Draw
from meshrl.sft.data.rendering import TEMPLATES
from meshrl.sft.data.tokenization import shown
from meshrl.training.model_config import TrainerModelConfig

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"name": "f", "description": "", "parameters": {}}
EMPTY = "<think>\n\n</think>\n\n"
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

Try = Callable[[dict[str, Any]], str]


def said(content: Any = "yes", **keys: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **keys}
    return {"messages": [USER, {key: value for key, value in message.items() if value is not ...}]}


@pytest.fixture
def row(tmp_path: Path) -> Try:
    """Tokenizes a row of a file by the template of Qwen3 that comes with `sft`; gives it as --show-rows prints it."""

    def tokenize(row: dict[str, Any], template: str | None = None) -> str:
        tokenizer = chatml_tokenizer(template or (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"))
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "train.jsonl").write_text(json.dumps(row))
        config = SFTConfig(
            model=TrainerModelConfig(name=str(tmp_path / "model")), data=DataConfig(name=str(tmp_path / "train.jsonl"))
        )
        rows = TokenizedRows(config.text, config.data)
        return shown(rows.sample(Draw(cursor=Cursor(), part=0, row=0, passed=0.0)).sample, tokenizer)

    return tokenize


def used(row: Try, given: dict[str, Any], text: str) -> None:
    assert f"[[{text}<|im_end|>]]" in row(given)


def refused(row: Try, given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        row(given)


def check_messages(row: Try, warned: list[str]) -> None:
    used(row, {**said(), "prompt": "other", "completion": "no"}, f"{EMPTY}yes")
    assert [line.partition("not used: ")[2] for line in warned] == ["column 'completion'", "column 'prompt'"]


def check_prompt(row: Try, warned: list[str]) -> None:
    used(row, {"prompt": "q", "completion": "yes"}, f"{EMPTY}yes")
    used(row, {"prompt": [USER], "completion": said()["messages"][1:]}, f"{EMPTY}yes")
    earlier = {"prompt": [*said("no")["messages"], USER], "completion": "yes"}
    assert row(earlier).count("[[") == 1


def check_neither(row: Try, warned: list[str]) -> None:
    refused(row, {"text": "hi", "id": 1}, r"line 1 has columns \['id', 'text'\]; expected messages, or prompt")


def check_tools(row: Try, warned: list[str]) -> None:
    for given in ({"tool_defs": [TOOL]}, {"tools": [{"type": "function", "function": TOOL}]}):
        assert '<tools>\n{"type": "function", "function": {"name": "f"' in row({**said(), **given})
        as_text = {key: json.dumps(value) for key, value in given.items()}
        assert row({**said(), **as_text}) == row({**said(), **given})


def check_options(row: Try, warned: list[str]) -> None:
    used(row, {**said(), "chat_template_kwargs": {"enable_thinking": False}}, "yes")


def check_column(row: Try, warned: list[str]) -> None:
    row({**said(), "score": 1})
    assert [line.partition("not used: ")[2] for line in warned] == ["column 'score'"]


def check_text(row: Try, warned: list[str]) -> None:
    used(row, said("yes"), f"{EMPTY}yes")
    used(row, said(None), EMPTY)


def check_parts(row: Try, warned: list[str]) -> None:
    used(row, said([{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]), f"{EMPTY}yes")
    asked = {"role": "user", "content": [{"type": "text", "text": "question"}]}
    assert "user\nquestion<|im_end|>" in row({"messages": [asked, said()["messages"][1]]})


def check_other_part(row: Try, warned: list[str]) -> None:
    refused(row, said([{"type": "image_url", "image_url": {"url": "x"}}]), "line 1, message 1 .* 'image_url'")


def check_no_content(row: Try, warned: list[str]) -> None:
    refused(row, said(...), "line 1, message 1 of messages: a message of role 'assistant' needs content")


def check_calls(row: Try, warned: list[str]) -> None:
    of_verifiers = {"name": "f", "arguments": {"a": 1}}
    for call in (CALL, {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}, of_verifiers):
        used(row, said(..., tool_calls=[call]), f"{EMPTY}{CALLED}")


def check_calls_left_out(row: Any, warned: list[str]) -> None:
    with pytest.raises(DataError, match="message 1: calls tools, which the chat template leaves out"):
        row(said(tool_calls=[CALL]), PLAIN)


def check_reasoning(row: Any, warned: list[str]) -> None:
    for key in ("reasoning_content", "reasoning"):
        used(row, said(**{key: "why"}), "<think>\nwhy\n</think>\n\nyes")
        by_name = PLAIN.replace("m.content", "(m.reasoning or '') ~ m.content")
        assert "[[whyyes<|im_end|>]]" in row(said(**{key: "why"}), by_name)
    assert not warned
    assert "[[yes<|im_end|>]]" in row(said(reasoning_content="why"), PLAIN)
    assert warned[-1].endswith("not used: 'reasoning_content', which the chat template leaves out")


def check_marks(row: Try, warned: list[str]) -> None:
    for key in ("weight", "loss_mask", "trainable", "train"):
        assert "[[" not in row(said(**{key: 0}))
        used(row, said(**{key: True}), f"{EMPTY}yes")
        asked = {**USER, key: 1}
        assert "[[<|im_start|>user\nq<|im_end|>]]" in row({"messages": [asked, *said()["messages"][1:]]})


def check_half(row: Try, warned: list[str]) -> None:
    refused(row, said(weight=0.5), r"message 1: weight must be 0 or 1 \(or false or true\), got 0.5")


def check_key(row: Any, warned: list[str]) -> None:
    row(said(mood="good"))
    assert warned[-1].endswith("not used: 'mood', which the chat template leaves out")
    read = PLAIN.replace("m.content", "m.content ~ (m.mood or '')")
    assert "[[yesgood<|im_end|>]]" in row(said(mood="good"), read)
    assert len(warned) == 1


def check_role(row: Try, warned: list[str]) -> None:
    assert "[[" not in row({"messages": [USER, {"role": "gpt", "content": "yes"}]})
    assert warned[-1].endswith("not used: role 'gpt', which loss_mask does not have")
    row({"messages": [USER, {"role": "model", "content": "yes", "weight": 1}]})
    assert len(warned) == 1


CHECKS = {
    "`messages`": check_messages,
    "`prompt`, `completion`": check_prompt,
    "neither": check_neither,
    "`tools`, `tool_defs`": check_tools,
    "`chat_template_kwargs`": check_options,
    "another column": check_column,
    "`content` as text or null": check_text,
    "`content` as parts of text": check_parts,
    "`content` with another part": check_other_part,
    "no `content`, no `tool_calls`": check_no_content,
    "`tool_calls`": check_calls,
    "`tool_calls`, a template without them": check_calls_left_out,
    "`reasoning_content`, `reasoning`": check_reasoning,
    "`weight`, `loss_mask`, `trainable`, `train`": check_marks,
    "`weight` between 0 and 1": check_half,
    "another role than those of `loss_mask`": check_role,
    "another key of a message": check_key,
}


def lines_of_table() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition("| row or message | outcome |\n|---|---|\n")[2]
    return [line.split("|")[1].strip() for line in text.partition("\n\n")[0].splitlines()]


def test_the_page_has_a_line_for_each_check() -> None:
    assert lines_of_table() == list(CHECKS)


@pytest.mark.parametrize("line", CHECKS)
def test_a_row_has_the_outcome_of_the_table(line: str, row: Try, warned: list[str]) -> None:
    CHECKS[line](row, warned)
