"""What is learned under the chat templates of published models, beside what the renderer of each family learns.

Templates come from TRL's wheel; Mistral's is written out here. `renderers` has none for Phi, Gemma 3, Mistral and
Qwen 2.5, and gpt-oss' needs a download, so the text of those is written by hand from the markup of the template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from family_tokenizer import BAR, DEEPSEEK_END, family_tokenizer, published_template
from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.rendering import Renderers
from meshrl.sft.data.tokenization import ConversationTokenizer, shown

LEARNED = frozenset({"assistant"})
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = {"id": "call_00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "w"}}}
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


SYSTEM = {"role": "system", "content": "Be kind."}
FOUND = {"role": "tool", "content": "found", "tool_call_id": "call_00000", "name": "look_up"}
TWO = (user("q"), assistant("yes"), user("more"), assistant("no"))
CONVERSATIONS = {
    "one": Conversation(row="row 0", messages=TWO[:2]),
    "system": Conversation(row="row 0", messages=(SYSTEM, *TWO[:2])),
    "two": Conversation(row="row 0", messages=TWO),
    "last": Conversation(row="row 0", messages=TWO, learn_from=3),
    "tools": Conversation(
        row="row 0", messages=(user("q"), assistant("", tool_calls=[CALL]), FOUND, assistant("done")), tools=(TOOL,)
    ),
    "thinking": Conversation(
        row="row 0",
        messages=(
            user("q"),
            assistant("yes", reasoning_content="why"),
            user("more"),
            assistant("no", reasoning_content="so"),
        ),
    ),
}


@dataclass(frozen=True)
class Family:
    """A template with its tokenizer's end of text, and the renderer of its models where there is one.

    `opening`: text with which a turn of the renderer begins, and that of the template. They differ where the prompt for
    a generation ends elsewhere: tokens of that prompt are given to the model, so they are not learned.
    """

    template: str
    eos: str
    renderer: str | None = None
    bos: str | None = None
    opening: tuple[str, str] = ("", "")


FAMILIES = {
    "llama-3": Family("llama3_1", "<|eot_id|>", "llama-3", "<|begin_of_text|>"),
    "qwen3": Family("qwen3", "<|im_end|>", "qwen3"),
    "qwen3.5": Family("qwen3_5_think", "<|im_end|>", "qwen3.5", opening=("<think>\n", "")),
    "glm-4.5": Family("glm4moe", "<|endoftext|>", "glm-4.5", opening=("", "\n")),
    "deepseek-v3": Family("deepseekv3", DEEPSEEK_END, "deepseek-v3", f"<{BAR}begin\u2581of\u2581sentence{BAR}>"),
    "deepseek-r1": Family(
        "deepseek_r1_distill", DEEPSEEK_END, "deepseek-r1", f"<{BAR}begin\u2581of\u2581sentence{BAR}>"
    ),
}


def tokenizer_of(family: Family) -> Any:
    return family_tokenizer(published_template(family.template), eos_token=family.eos, bos_token=family.bos)


def learned_by(conversation: Conversation, tokenizer: Any, renderers: Renderers | None = None) -> list[str]:
    tokenize = ConversationTokenizer(tokenizer, renderers, learned_roles=LEARNED)
    return re.findall(r"\[\[(.*?)\]\]", shown(tokenize(conversation), tokenizer), re.DOTALL)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_template_learns_what_the_renderer_of_its_family_learns(family: str, name: str) -> None:
    which = FAMILIES[family]
    tokenizer = tokenizer_of(which)
    if (family, name) == ("deepseek-r1", "tools"):  # the generation prompt opens a thought
        with pytest.raises(DataError, match="does not begin the message as the template renders it"):
            learned_by(CONVERSATIONS[name], tokenizer)
        return
    by_renderer = learned_by(CONVERSATIONS[name], tokenizer, Renderers(tokenizer, {"name": which.renderer}))
    by_template = learned_by(CONVERSATIONS[name], tokenizer)
    theirs, ours = which.opening
    assert by_template in (by_renderer, [ours + text.removeprefix(theirs) for text in by_renderer])
    assert all(text.endswith(by_renderer[place][-4:]) for place, text in enumerate(by_template))


YES_NO = {"one": ["yes"], "system": ["yes"], "two": ["yes", "no"], "last": ["no"], "thinking": ["yes", "no"]}
CHATML_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "w"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "eos", "end", "tools"),
    [
        ("qwen2_5", "<|im_end|>", "<|im_end|>", [CHATML_CALL, "done"]),
        ("qwen3_instruct_2507", "<|im_end|>", "<|im_end|>", [CHATML_CALL, "done"]),
        ("phi3", "<|endoftext|>", "<|end|>", None),
        ("gemma3", "<eos>", "<end_of_turn>", None),
        ("gemma3_training", "<eos>", "<end_of_turn>", None),
    ],
)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_turn_is_learned_to_the_token_that_ends_it_and_no_further(
    template: str, eos: str, end: str, tools: list[str] | None, name: str
) -> None:
    tokenizer = family_tokenizer(published_template(template), eos_token=eos, bos_token="<bos>")
    if name == "tools" and tools is None:
        with pytest.raises(DataError, match=r"calls tools, which the chat template leaves out|must alternate"):
            learned_by(CONVERSATIONS[name], tokenizer)
        return
    texts = tools if name == "tools" else YES_NO[name]
    assert learned_by(CONVERSATIONS[name], tokenizer) == [f"{text}{end}" for text in texts or ()]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_mistral_learns_its_end_of_text(name: str) -> None:
    tokenizer = family_tokenizer(MISTRAL, eos_token="</s>", bos_token="<bos>")
    if name in ("system", "tools"):
        with pytest.raises(DataError, match=r"only user and assistant|calls tools, which the chat template leaves out"):
            learned_by(CONVERSATIONS[name], tokenizer)
        return
    assert learned_by(CONVERSATIONS[name], tokenizer) == [f" {text}</s>" for text in YES_NO[name]]


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("one", [f"{FINAL}yes<|return|>"]),
        ("system", [f"{FINAL}yes<|return|>"]),
        ("two", [f"{FINAL}yes<|end|>", f"{FINAL}no<|return|>"]),
        ("last", [f"{FINAL}no<|return|>"]),
        ("thinking", [f"{FINAL}yes<|end|>", f"{FINAL}no<|return|>"]),
        (
            "tools",
            [
                ' to=functions.look_up<|channel|>commentary json<|message|>{"word": "w"}<|call|>',
                f"{FINAL}done<|return|>",
            ],
        ),
    ],
)
def test_gpt_oss_learns_the_end_of_each_kind_of_turn(name: str, texts: list[str]) -> None:
    tokenizer = family_tokenizer(published_template("gptoss"), eos_token="<|return|>")
    assert learned_by(CONVERSATIONS[name], tokenizer) == texts


def test_generation_marks_are_taken_where_a_template_has_them() -> None:
    tokenizer = family_tokenizer(published_template("qwen3_training"), eos_token="<|im_end|>")
    tokenize = ConversationTokenizer(tokenizer, None, learned_roles=LEARNED)
    text = shown(tokenize(CONVERSATIONS["thinking"]), tokenizer)
    assert re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL) == [
        "<think>\nwhy\n</think>\n\nyes<|im_end|>",
        "<think>\nso\n</think>\n\nno<|im_end|>",
    ]
    assert list(tokenize.ways) == ["the generation marks of the chat template"]


def test_a_template_with_marks_that_leaves_calls_out_is_refused_too() -> None:
    marked = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% generation %}{{ m.content ~ '<|im_end|>' }}"
        "{% endgeneration %}{% endfor %}"
    )
    tokenizer = family_tokenizer(marked, eos_token="<|im_end|>")
    with pytest.raises(DataError, match="message 1: calls tools, which the chat template leaves out"):
        learned_by(CONVERSATIONS["tools"], tokenizer)


def test_calls_of_a_template_that_writes_them_in_place_of_null_content_are_learned() -> None:
    """As those of DeepSeek-V3 and of DeepSeek-R1-Distill, which also take arguments as JSON text alone."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m['content'] is none %}"
        "{% for call in m['tool_calls'] %}{{ call.function.name + call.function.arguments }}{% endfor %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = family_tokenizer(template, eos_token="<|im_end|>")
    assert learned_by(CONVERSATIONS["tools"], tokenizer) == ['look_up{"word": "w"}<|im_end|>', "done<|im_end|>"]
    beside = Conversation(row="row 0", messages=(user("q"), assistant("let me see", tool_calls=[CALL])), tools=(TOOL,))
    with pytest.raises(DataError, match="message 1: calls tools, which the chat template leaves out beside"):
        learned_by(beside, tokenizer)


GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' ~ ('observation' if m.role == 'tool' else m.role) ~ '|>\n' ~ m.content"
    " ~ (m.tool_calls | tojson if m.tool_calls else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def test_a_turn_that_the_next_header_ends_is_learned_with_the_token_of_that_header() -> None:
    tokenizer = family_tokenizer(GLM, eos_token="<|endoftext|>")
    messages = (SYSTEM, user("q"), assistant("yo"), user("more"), assistant("ok"))
    assert learned_by(Conversation(row="row 0", messages=messages), tokenizer) == ["yo<|user|>", "ok<|endoftext|>"]
    called, answered = learned_by(CONVERSATIONS["tools"], tokenizer)
    assert called.endswith("<|observation|>")
    assert answered == "done<|endoftext|>"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEEDS_A_USER = (
    "{% if not (messages | selectattr('role', 'equalto', 'user') | list) %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + CHATML
)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_plain_chatml_learns_each_answer_with_its_end(name: str) -> None:
    tokenizer = family_tokenizer(CHATML, eos_token="<|im_end|>")
    if name == "tools":
        with pytest.raises(DataError, match="message 1: calls tools, which the chat template leaves out"):
            learned_by(CONVERSATIONS[name], tokenizer)
        return
    assert learned_by(CONVERSATIONS[name], tokenizer) == [f"{text}<|im_end|>" for text in YES_NO[name]]


def test_only_prefixes_that_bound_a_learned_message_are_rendered() -> None:
    tokenizer = family_tokenizer(NEEDS_A_USER, eos_token="<|im_end|>")
    assert learned_by(CONVERSATIONS["system"], tokenizer) == ["yes<|im_end|>"]
    conversation = Conversation(row="row 3", messages=(SYSTEM, assistant("hello"), user("q"), assistant("yes")))
    assert learned_by(conversation, tokenizer) == ["hello<|im_end|>", "yes<|im_end|>"]  # a renderer makes these tokens
    tokenizer.chat_template = NEEDS_A_USER.replace("m.role ~", "'role ' ~ m.role ~")  # and none makes these
    with pytest.raises(DataError, match=r"row 3, message 1 \(assistant\): .* cannot render the 1 messages .*No user"):
        learned_by(conversation, tokenizer)


def test_a_prompt_that_does_not_begin_the_message_is_named_with_its_end() -> None:
    thinking_only = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>role assistant\nThink: ")
    thinking_only = thinking_only.replace("m.role ~", "'role ' ~ m.role ~")
    tokenizer = family_tokenizer(thinking_only, eos_token="<|im_end|>")
    with pytest.raises(DataError, match=r"generation prompt .* ends in '.*Think: ', does not begin .*--renderer.name"):
        learned_by(CONVERSATIONS["one"], tokenizer)


def test_a_message_that_is_marked_decides_for_itself() -> None:
    from meshrl.sft.data.conversations import to_conversation

    tokenizer = family_tokenizer(CHATML, eos_token="<|im_end|>")
    for key, no in (("weight", 0), ("loss_mask", 0), ("trainable", False), ("train", False)):
        messages = [user("q"), assistant("bad", **{key: no}), user("more"), assistant("good", **{key: not no})]
        conversation = to_conversation({"messages": messages}, "row 0")
        assert learned_by(conversation, tokenizer) == ["good<|im_end|>"]
        assert all(key not in message for message in conversation.messages)
    (asked,) = learned_by(to_conversation({"messages": [{**user("q"), "train": True}]}, "row 0"), tokenizer)
    assert asked.endswith("q<|im_end|>")
    with pytest.raises(DataError, match=r"row 4, message 1: weight must be 0 or 1 .*got 0.5"):
        to_conversation({"messages": [user("q"), assistant("half", weight=0.5)]}, "row 4")
    with pytest.raises(DataError, match="weight and train contradict each other"):
        to_conversation({"messages": [user("q"), assistant("half", weight=0, train=True)]}, "row 4")
