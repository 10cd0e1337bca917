"""Tool calls and reasoning over /v1/chat/completions, of a model that was taught to call a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient
from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig, create_renderer
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from chatml_tokenizer import chatml_tokenizer
from inference_kit import EngineFactory, Start, make_tokenizer, post
from meshrl.inference.http.chat_replies import ChatReplies
from meshrl.inference.http.tokenizer import TextCodec
from meshrl.models.load import ModelError
from meshrl.sft.data import rendering

CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "Where?"}
THOUGHT = "<think>\nLook.\n</think>\n\n"
CALLS = "".join(
    f'<tool_call>\n{{"name": "find", "arguments": {{"word": "{word}"}}}}\n</tool_call>\n' for word in ("né", "b")
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
ROWS: Sequence[tuple[dict[str, str], list[dict[str, Any]] | None, str]] = (
    (QUESTION, None, f"{THOUGHT}Here."),
    (QUESTION, [TOOL], THOUGHT + CALLS.strip()),
)


@pytest.fixture(scope="session")
def taught() -> PreTrainedModel:
    """A tiny Qwen3 over bytes whose greedy completions are the answers of ROWS, which it has learned by heart."""
    tokenizer = chatml_tokenizer(TEMPLATE)
    rows = []
    for question, tools, said in ROWS:
        prompt = tokenizer.apply_chat_template([question], tools=tools, add_generation_prompt=True, return_dict=False)
        reply = tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        rows.append((torch.tensor([prompt + reply]), torch.tensor([[-100] * len(prompt) + reply])))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.05, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    worst = 1.0
    for _ in range(600):
        losses = [model(input_ids=tokens, labels=labels).loss for tokens, labels in rows]
        worst = float(torch.stack(losses).max().detach())
        if worst < 0.02:
            break
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert worst < 0.02
    return model.eval()


@pytest.fixture
async def client(taught: PreTrainedModel, start_engine: EngineFactory, serve: Start) -> TestClient:
    tokenizer = chatml_tokenizer(TEMPLATE)
    engine = await start_engine(taught, max_model_len=1024, eos_token_ids=())  # its renderer knows the end of a turn
    codec = TextCodec(tokenizer, replies=ChatReplies.load(tokenizer, {"name": "qwen3"}))
    return await serve(engine, codec)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [QUESTION], "tools": [TOOL], "temperature": 0.0, "max_tokens": 200, **fields}


async def test_calls_and_reasoning_are_fields_of_the_message(client: TestClient) -> None:
    _, answer = await post(client, CHAT, body(n=2))
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == (None, "Look.")
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
            {"word": "né"}, {"word": "b"},
        ]  # fmt: skip
        assert {(call["type"], call["function"]["name"]) for call in message["tool_calls"]} == {("function", "find")}
        assert choice["finish_reason"] == "tool_calls"
    identifiers = {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
    assert len(identifiers) == 4
    _, single = await post(client, CHAT, body(parallel_tool_calls=False))
    assert len(single["choices"][0]["message"]["tool_calls"]) == 1


async def test_openais_client_reads_a_stream_with_calls(client: TestClient) -> None:
    async with AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key="none", max_retries=0) as openai:
        async with openai.chat.completions.stream(**body()) as stream:
            async for _ in stream:
                pass
        choice = (await stream.get_final_completion()).choices[0]
        calls = choice.message.tool_calls or []
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "b"}]} for call in calls
        ]
        answered = [QUESTION, choice.message.model_dump(), *results]
        again = await openai.chat.completions.create(**body(messages=answered, max_tokens=1))
    assert choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in calls] == ['{"word": "n\\u00e9"}', '{"word": "b"}']
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


async def test_without_tools_or_with_tool_choice_none_the_model_is_offered_none(client: TestClient) -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        _, answer = await post(client, CHAT, body(**fields))
        message = {"role": "assistant", "content": "Here.", "reasoning_content": "Look."}
        assert (answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]) == (message, "stop")


async def test_a_cut_or_stopped_answer_keeps_what_is_no_whole_call(client: TestClient) -> None:
    _, answer = await post(client, CHAT, body(max_tokens=len("<think>\nLook.\n</think>") + 10))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "tool_calls" not in choice["message"]
    _, stopped = await post(client, CHAT, body(tools=None, stop="re"))
    assert stopped["choices"][0]["message"]["content"] == "He"


async def test_a_conversation_with_calls_has_the_tokens_that_its_renderer_gives_it() -> None:
    messages: list[dict[str, Any]] = [
        QUESTION,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"word": "b"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "there"},
    ]
    template = (Path(rendering.__file__).with_name("templates") / "qwen3.jinja").read_text()
    codec = TextCodec(chatml_tokenizer(template))
    prompt = await codec.encode_chat(messages, tools=[TOOL], arguments={}, add_generation_prompt=True)
    renderer = create_renderer(chatml_tokenizer(), Qwen3RendererConfig())
    assert list(prompt) == renderer.render_ids(messages, tools=[TOOL], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice 'required' is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, "does not constrain"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"functions": [{"name": "find"}]}, "tools and tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused(client: TestClient, fields: dict[str, Any], words: str) -> None:
    status, answer = await post(client, CHAT, body(**fields))
    assert (status, words in answer["error"]["message"]) == (400, True), answer


def test_a_renderer_is_taken_by_name_and_refused_where_it_does_not_fit() -> None:
    tokenizer = chatml_tokenizer()
    assert ChatReplies.load(tokenizer, {}) is None  # nothing says which family it is of
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    found = ChatReplies.load(tokenizer, {})
    assert found is not None
    assert found.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert found.supports_tools
    with pytest.raises(ModelError, match="does not fit"):
        ChatReplies.load(make_tokenizer(), {"name": "qwen3"})
    with pytest.raises(ModelError, match=r"inference\.renderer"):
        ChatReplies.load(tokenizer, {"name": "qwen33"})


def test_calls_that_do_not_parse_stay_in_the_content() -> None:
    tokenizer = chatml_tokenizer()
    replies = ChatReplies.load(tokenizer, {"name": "qwen3"})
    assert replies is not None
    text = '<tool_call>\n{"name": "find", "arguments"\n</tool_call>\n<tool_call>\n{"name": "find"}\n</tool_call>'
    reply = replies.reply([], tokenizer.encode(f"So: {text}"), text=f"So: {text}", tools=[TOOL])
    assert reply["content"] == 'So:\n<tool_call>\n{"name": "find", "arguments"\n</tool_call>'
    assert [call["function"] for call in reply["tool_calls"]] == [{"name": "find", "arguments": "{}"}]
