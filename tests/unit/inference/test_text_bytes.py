"""Tokens that are parts of a character: their bytes, the text that they become, and how OpenAI's client reads them."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chatml_tokenizer import chatml_tokenizer
from inference_kit import EngineFactory, Start, make_model
from meshrl.inference.http.token_bytes import TokenBytes
from meshrl.inference.http.tokenizer import TextCodec, TextStream

ANSWER = "HEY 😀."
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a mark for their space, and 256 bytes for what is no word: Llama 2's and Mistral's shape."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "é"]
    backend = Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(words)}, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece: tokens that only their decoder joins."""
    words = ["[UNK]", "play", "##ing", "##é", "chess", "\ufffd", "."]
    backend = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


TOKENIZERS = {"byte level": chatml_tokenizer, "byte fallback": fallback_tokenizer, "word piece": word_tokenizer}


def test_a_byte_level_token_has_the_bytes_that_its_letters_stand_for() -> None:
    tokenizer = chatml_tokenizer()
    found = TokenBytes(tokenizer)
    assert found.joins
    for byte, letter in bytes_to_unicode().items():
        assert found.of(tokenizer.convert_tokens_to_ids(letter)) == bytes([byte])
    assert found.of(tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
    assert found.of(10**6) == b""


def test_a_byte_fallback_token_has_its_byte_or_its_word() -> None:
    tokenizer = fallback_tokenizer()
    found = TokenBytes(tokenizer)
    ids = tokenizer.encode("a a😀é", add_special_tokens=False)
    assert found.joins
    assert [found.of(each) for each in ids] == [b" a", b" a", b"\xf0", b"\x9f", b"\x98", b"\x80", "é".encode()]


def test_tokens_that_only_their_tokenizer_joins_have_the_bytes_of_their_own_text() -> None:
    found = TokenBytes(word_tokenizer())
    assert not found.joins
    assert [found.of(each) for each in (1, 6)] == [b"play", b"."]


def streamed(codec: TextCodec, ids: Sequence[int], **how: Any) -> list[str]:
    stream = TextStream(codec, skip_special_tokens=True, **how)
    pieces = [stream.push([each]) for each in ids]
    return [*pieces, stream.push([], last=True)]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_stream_adds_up_to_what_the_tokenizer_decodes(name: str) -> None:
    tokenizer, draw = TOKENIZERS[name](), random.Random(1)
    codec = TextCodec(tokenizer)
    for _ in range(100):
        text = "".join(draw.choice("ab é中😀\u0e01\n") for _ in range(draw.randint(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids.insert(
            draw.randint(0, len(ids)), tokenizer.eos_token_id
        ) if draw.random() < 0.2 and text.isascii() else None
        assert "".join(streamed(codec, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_words_are_decoded_by_their_tokenizer() -> None:
    tokenizer = word_tokenizer()
    ids = tokenizer.encode("playing chess playingé.", add_special_tokens=False)
    assert "".join(streamed(TextCodec(tokenizer), ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_text_are_given_out_at_once() -> None:
    tokenizer = chatml_tokenizer()
    of = dict(zip(range(256), tokenizer.convert_tokens_to_ids(list(bytes_to_unicode().values())), strict=True))
    byte = dict(zip(bytes_to_unicode(), of.values(), strict=True))
    codec = TextCodec(tokenizer)
    assert streamed(codec, [byte[0xFF]] * 5) == ["\ufffd"] * 5 + [""]
    mixed = [byte[each] for each in (0xFF, 0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xB8, 0x41)]
    assert streamed(codec, mixed) == ["\ufffd", "", "", "", "😀", "", "", "\ufffdA", ""]
    assert streamed(codec, [byte[0xFF]] * 3 + [byte[0x41]], stops=("A",)) == ["\ufffd"] * 3 + ["", ""]


@pytest.mark.parametrize("name", list(TOKENIZERS))
@pytest.mark.parametrize("stops", [(), ("never",)], ids=["plain", "stops"])
def test_the_work_for_a_run_that_is_no_text_grows_with_its_length(
    monkeypatch: pytest.MonkeyPatch, name: str, stops: tuple[str, ...]
) -> None:
    tokenizer = TOKENIZERS[name]()
    broken = {"byte level": "ÿ", "byte fallback": "<0xFF>", "word piece": "\ufffd"}[name]
    codec, decoded = TextCodec(tokenizer), 0
    decode = codec.decode

    def counted(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(codec, "decode", counted)
    stream = TextStream(codec, skip_special_tokens=True, stops=stops)
    pieces = [stream.push([tokenizer.convert_tokens_to_ids(broken)]) for _ in range(2000)]
    assert decoded <= 20 * 2000
    assert sum(map(bool, pieces)) >= 400  # it streams


# --- over HTTP, as OpenAI's client reads it ---------------------------------------------------------


@pytest.fixture(scope="session")
def scripted() -> PreTrainedModel:
    """Greedily says ANSWER and ends, whatever it is asked: each byte has one successor, that of a newline is the H."""
    tokenizer = chatml_tokenizer(TEMPLATE)
    chain = [*tokenizer.encode("\n" + ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    size = len(tokenizer) + len(tokenizer) % 2
    model = make_model(vocab_size=len(tokenizer), hidden_size=size, num_hidden_layers=1, tie_word_embeddings=False)
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.fill_(1.0 if "norm" in name else 0.0)
        for token in range(len(tokenizer)):
            model.get_input_embeddings().weight[token, token] = 1.0
        for token, successor in itertools.pairwise(chain):
            model.get_output_embeddings().weight[successor, token] = 5.0
    return model


@pytest.fixture
async def sdk(start_engine: EngineFactory, serve: Start, scripted: PreTrainedModel) -> AsyncIterator[AsyncOpenAI]:
    tokenizer = chatml_tokenizer(TEMPLATE)
    client = await serve(await start_engine(scripted, eos_token_ids=(tokenizer.eos_token_id,)), TextCodec(tokenizer))
    async with AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key="x", max_retries=0) as made:
        yield made


CHAT: dict[str, Any] = {
    "model": "org/tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}], "temperature": 0,
}  # fmt: skip


async def test_the_bytes_of_logprobs_put_the_answer_together(sdk: AsyncOpenAI) -> None:
    for extra in ({}, {"return_tokens_as_token_ids": True}):
        answer = await sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, extra_body=extra)
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        told = [bytes(entry.bytes or []) for entry in entries]
        assert b"".join(told) == ANSWER.encode() + b"<|im_end|>"
        assert told[4:8] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
        assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].bytes == entry.bytes for entry in entries)
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] is None  # the model's own end, as vLLM has it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "before"), [("😀", "HEY "), (["Z", "Y 😀"], "HE"), ("é", ANSWER)])
async def test_a_stop_outside_of_ascii_ends_the_text_before_it_and_is_named(
    sdk: AsyncOpenAI, stop: str | list[str], before: str, stream: bool
) -> None:
    named = None if before == ANSWER else (stop if isinstance(stop, str) else stop[-1])
    if stream:
        text, choice = "", None
        async for event in await sdk.chat.completions.create(**CHAT, stop=stop, stream=True):
            choice = event.choices[0]
            text += choice.delta.content or ""
    else:
        choice = (await sdk.chat.completions.create(**CHAT, stop=stop)).choices[0]
        text = choice.message.content or ""
    assert choice is not None
    assert choice.model_extra is not None
    assert (text, choice.finish_reason, choice.model_extra["stop_reason"]) == (before, "stop", named)


async def test_a_stop_token_of_the_request_is_named(sdk: AsyncOpenAI) -> None:
    dot = chatml_tokenizer().convert_tokens_to_ids(".")
    answer = await sdk.chat.completions.create(**CHAT, extra_body={"stop_token_ids": [dot]})
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == dot


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_plain_completions_are_places_in_the_text(sdk: AsyncOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "?\n", "temperature": 0, "logprobs": 2}
    text, tokens, offsets, tops = "", [], [], []
    answers = [await sdk.completions.create(**asked)]
    if stream:
        answers = [event async for event in await sdk.completions.create(**asked, stream=True)]
    for answer in answers:
        [choice] = answer.choices
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens or []
            offsets += choice.logprobs.text_offset or []
            tops += choice.logprobs.top_logprobs or []
    assert text == ANSWER
    assert tokens == ["H", "E", "Y", " ", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", ".", "<|im_end|>"]
    assert offsets == [0, 1, 2, 3, 4, 4, 4, 4, 5, 6]
    assert [text[at] for at in offsets[:-1]] == [*"HEY ", *"😀😀😀😀", "."]
    assert all(token in top for token, top in zip(tokens, tops, strict=True))


async def test_a_sampled_token_that_is_not_among_the_likeliest_is_in_top_logprobs(sdk: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "prompt": "?",
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 1,
    }
    logprobs = (await sdk.completions.create(**asked)).choices[0].logprobs
    assert logprobs is not None
    pairs = list(zip(logprobs.tokens or [], logprobs.top_logprobs or [], strict=True))
    assert all(token in top for token, top in pairs)
    assert any(len(top) == 2 for _, top in pairs)
