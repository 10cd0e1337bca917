"""Text prompts over HTTP that would hold the tokenizer: templates of a request, long texts, odd template arguments."""

import asyncio
import threading
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from transformers import PreTrainedTokenizerFast

from inference_kit import Start, make_tokenizer
from meshrl.inference.http.tokenizer import TextCodec
from meshrl.inference.http.tokenizer_pool import TokenizerPool

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "abc"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def codec(tokenizer: PreTrainedTokenizerFast | None = None, **settings: Any) -> TextCodec:
    return TextCodec(tokenizer or make_tokenizer(), **settings)


async def post(client: TestClient, path: str, body: Any) -> tuple[int, str]:
    async with asyncio.timeout(60.0), client.post(path, json={"max_tokens": 1, **body}) as response:
        answer = await response.json()
    return response.status, answer["error"]["message"] if response.status != 200 else ""


@pytest.mark.parametrize(
    "fields",
    [{"chat_template": ENDLESS}, {"chat_template_kwargs": {"chat_template": ENDLESS}}],
    ids=["field", "kwargs"],
)
async def test_template_of_a_request_is_refused(serve: Start, fields: Any) -> None:
    client = await serve()
    status, message = await post(client, CHAT, {"messages": MESSAGES, **fields})
    assert status == 400
    assert "inference.trust_request_chat_template" in message
    assert (await post(client, CHAT, {"messages": MESSAGES}))[0] == 200


async def test_template_of_a_trusted_request_is_used(serve: Start) -> None:
    client = await serve(codec=codec(trust_request_chat_template=True))
    body = {"messages": MESSAGES, "chat_template": "x:{{ messages[0].content }}", "return_token_ids": True}
    async with client.post(CHAT, json={"max_tokens": 1, **body}) as response:
        assert make_tokenizer().decode((await response.json())["prompt_token_ids"]) == "x:abc"


async def test_endless_templates_are_ended_and_the_routes_go_on(serve: Start) -> None:
    client = await serve(codec=codec(trust_request_chat_template=True, encode_limit_s=0.3))
    bad = {"messages": MESSAGES, "chat_template": ENDLESS}
    for status, message in await asyncio.gather(*(post(client, CHAT, bad) for _ in range(6))):
        assert status == 400
        assert "took more than 0.3 s" in message
    # The time a good one takes is no matter of this test; a tokenizer that is held would fail it ten times over.
    for path, good in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "abc"})):
        for _ in range(20):
            status, _ = await post(client, path, good)
            if status == 200:
                break
        assert status == 200


async def test_tokenizer_that_cannot_be_copied_is_said_and_costs_no_place() -> None:
    class Uncopied(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no type information
        def __deepcopy__(self, _memo: Any) -> Any:
            raise MemoryError("no room for a copy")

    pool = TokenizerPool(Uncopied(tokenizer_object=make_tokenizer().backend_tokenizer), workers=1, limit_s=30.0)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room for a copy"):
            await asyncio.wait_for(pool.run(lambda tokenizer: None), 60.0)


async def test_thread_that_cannot_be_started_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = TokenizerPool(make_tokenizer(), workers=1, limit_s=30.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await pool.run(lambda tokenizer: None)
    assert await asyncio.wait_for(pool.run(lambda tokenizer: 1), 60.0) == 1


async def test_text_beyond_the_bound_is_refused_before_it_is_tokenized(serve: Start) -> None:
    asked: list[str] = []

    class Watched(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no type information
        def encode(self, text: str, **kwargs: Any) -> Any:
            asked.append(text)
            return super().encode(text, **kwargs)

    tokenizer = make_tokenizer()
    watched = Watched(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    watched.chat_template = "{% for message in messages %}{{ message.content * 3 }}{% endfor %}"
    client = await serve(codec=codec(watched, max_prompt_bytes=60))
    long = [("/v1/completions", {"prompt": "a" * 61}), ("/v1/completions", {"prompt": ["a", "é" * 31]})]
    long += [(CHAT, {"messages": [{"role": "user", "content": "a" * n}]}) for n in (60, 21)]
    long += [(CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"more": ["a" * 60]}})]
    for path, body in long:
        status, message = await post(client, path, body)
        assert status == 400, body
        assert "inference.max_prompt_bytes" in message
    assert asked == ["a"]
    assert (await post(client, CHAT, {"messages": [{"role": "user", "content": "a" * 16}]}))[0] == 200


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": 5}, {"conversation": []}, {"tools": []}, {"tokenize": False}, {"return_tensors": "pt"},
        {"add_generation_prompt": False}, {"documents": 5}, {"self": 1}, {"kwargs": {}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
async def test_template_arguments_that_are_not_the_templates_are_refused(serve: Start, arguments: Any) -> None:
    client = await serve()
    status, message = await post(client, CHAT, {"messages": MESSAGES, "chat_template_kwargs": arguments})
    assert status == 400
    assert next(iter(arguments)) in message or "cannot render" in message


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ nothing.at.all }}", "{{ range(10**9) }}", "{% for %}",
        "{{ messages[7].role }}", "{{ messages.__class__.__mro__ }}", "{{ 'a' + 1 }}",
    ],
)  # fmt: skip
async def test_template_that_fails_is_the_requests_fault(serve: Start, template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    status, message = await post(await serve(codec=codec(tokenizer)), CHAT, {"messages": MESSAGES})
    assert status == 400
    assert "the chat template cannot render these messages" in message


async def test_template_arguments_reach_the_template(serve: Start) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if think %}t{% else %}n{% endif %}"
    client = await serve(codec=codec(tokenizer))
    body = {"messages": MESSAGES, "chat_template_kwargs": {"think": True}, "return_token_ids": True, "max_tokens": 1}
    async with client.post(CHAT, json=body) as response:
        assert (await response.json())["prompt_token_ids"] == make_tokenizer().encode("t")
