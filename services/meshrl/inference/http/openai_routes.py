"""POST /v1/chat/completions and /v1/completions: OpenAI's request formats for the same engine, whole or as a stream.

A choice also carries `version_spans` and `prompt_version` (see `token_route`), and `token_ids` on request. If the
model's renderer is known, a chat message has its `reasoning_content` and `tool_calls` apart; a stream only with tools,
in its last piece.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from aiohttp import web

from meshrl.inference.engine import FinishReason, GenerateRequest, TokenChunk
from meshrl.inference.http.chat_replies import NEEDS_A_PARSER
from meshrl.inference.http.runs import (
    Serving,
    gather,
    interleave,
    join,
    json_answer,
    said,
    send_events,
    spans_json,
)
from meshrl.inference.http.schemas import ChatBody, CompletionBody
from meshrl.inference.http.tokenizer import TextCodec, TextStream
from meshrl.wire.errors import MeshError, Reason


@dataclass(eq=False)
class _Choice:
    index: int
    prompt: int  # which prompt of the request it completes
    request: GenerateRequest
    text: TextStream
    offsets: TextStream  # the same text, of one token after the other
    offset: int = 0  # characters of it so far
    token_ids: list[int] = field(default_factory=list)  # sampled so far, without a stop token
    said: list[str] = field(default_factory=list)

    def add(self, chunk: TokenChunk) -> str:
        token_ids = chunk.token_ids.tolist()
        if chunk.stop_token_id is not None:
            token_ids = token_ids[:-1]
        self.token_ids += token_ids
        self.said.append(self.text.push(token_ids, last=chunk.finish_reason is not None))
        return self.said[-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    choice: _Choice
    text: str
    tokens: TokenChunk

    @property
    def finish_reason(self) -> FinishReason | None:
        return FinishReason.STOP if self.choice.text.stopped else self.tokens.finish_reason


class OpenAIRoutes:
    def __init__(self, serving: Serving, codec: TextCodec) -> None:
        self._serving = serving
        self._codec = codec

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read(request, ChatBody)
        if body.offered_tools and (self._codec.replies is None or not self._codec.replies.supports_tools):
            raise MeshError(Reason.NOT_SUPPORTED, NEEDS_A_PARSER)
        async with self._serving.deadline():
            prompt_ids = await self._codec.encode_chat(
                body.messages,
                tools=body.offered_tools,
                arguments=body.template_arguments,
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
            )
        return await _Answer(self._serving, self._codec, body, [prompt_ids]).to(request)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read(request, CompletionBody)
        async with self._serving.deadline():
            prompt = body.prompt
            if isinstance(prompt, str):
                prompt = [prompt]
            if not prompt:
                raise MeshError(Reason.INVALID_REQUEST, "prompt: an empty list; send at least one prompt or token id")
            if isinstance(prompt[0], int):
                prompt = [prompt]
            encode = self._codec.encode
            prompts = [
                await encode(each, add_special_tokens=body.add_special_tokens) if isinstance(each, str) else tuple(each)
                for each in prompt
            ]
        return await _Answer(self._serving, self._codec, body, prompts).to(request)


class _Answer:
    def __init__(
        self, serving: Serving, codec: TextCodec, body: ChatBody | CompletionBody, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._serving, self._codec, self._body = serving, codec, body
        self._of_chat = isinstance(body, ChatBody)
        self._request_id = f"{'chatcmpl' if self._of_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._choices = [
            self._choice(prompt * body.n + index, prompt, index, prompt_ids)
            for prompt, prompt_ids in enumerate(prompts)
            for index in range(body.n)
        ]

    def _choice(self, place: int, prompt: int, index: int, prompt_ids: tuple[int, ...]) -> _Choice:
        body, stops = self._body, self._body.stop_strings
        if isinstance(body, ChatBody):
            logprobs, tops = bool(body.logprobs), (body.top_logprobs or 0) if body.logprobs else 0
        else:
            logprobs, tops = body.logprobs is not None, body.logprobs or 0
        most = self._serving.engine.max_model_len
        params = body.params(most=most, index=index, logprobs=logprobs, top_logprobs=tops)
        if not body.ignore_eos:
            ends = (token for token in self._codec.stop_token_ids if token < self._serving.engine.vocab_size)
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        asked = GenerateRequest(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling=params,
            # with stop strings the text is watched as it grows, so the tokens must come one by one
            stream=body.stream or bool(stops),
            policy=self._serving.policy(body.model),
        )
        text = TextStream(
            self._codec, skip_special_tokens=body.skip_special_tokens, stops=stops, min_tokens=params.min_tokens
        )
        offsets = TextStream(self._codec, skip_special_tokens=body.skip_special_tokens)
        return _Choice(place, prompt, asked, text, offsets)

    async def to(self, request: web.Request) -> web.StreamResponse:
        if self._body.stream:
            return await send_events(self._serving, request, self._events())
        async with self._serving.deadline():
            pieces = await gather([self._whole(choice) for choice in self._choices])
        answer = self._head()
        answer["choices"] = [self._choice_json(piece) for piece in pieces]
        answer["usage"] = self._usage(sum(len(piece.tokens.token_ids) for piece in pieces))
        if self._body.return_token_ids and self._choices[-1].prompt == 0:
            answer["prompt_token_ids"] = list(self._choices[0].request.prompt_ids)
        return json_answer(json.dumps(answer), pieces[0].tokens.version)

    async def _whole(self, choice: _Choice) -> _Piece:
        def stops(chunk: TokenChunk) -> bool:
            choice.add(chunk)
            return choice.text.stopped

        tokens = await self._serving.complete(choice.request, ends=stops)
        return _Piece(choice=choice, text="".join(choice.said), tokens=tokens)

    async def _events(self) -> AsyncGenerator[str, None]:
        made, ended, opened = 0, 0, False
        async with aclosing(interleave(self._serving.spans, [each.request for each in self._choices])) as chunks:
            async for index, chunk in chunks:
                if self._of_chat and not opened:  # not before: a refusal is answered with its own status
                    opened = True
                    prompt = {"prompt_token_ids": self._choices[0].request.prompt_ids}
                    asked = prompt if self._body.return_token_ids else {}
                    for each in self._choices:
                        yield self._event(each, {"delta": {"role": "assistant", "content": ""}}, **asked)
                choice = self._choices[index]
                if choice.text.stopped:
                    continue
                piece = _Piece(choice=choice, text=choice.add(chunk), tokens=join([chunk]))
                made += len(chunk.token_ids)
                ended += piece.finish_reason is not None
                yield self._event(choice, self._choice_json(piece, delta=True))
                if ended == len(self._choices):
                    break
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield json.dumps({**self._head(), "choices": [], "usage": self._usage(made)})

    # --- shapes -----------------------------------------------------------------------------

    def _event(self, choice: _Choice, fields: dict[str, object], **others: object) -> str:
        choices = [{"index": choice.index, "finish_reason": None, **fields}]
        return json.dumps({**self._head(), **others, "choices": choices})

    def _head(self) -> dict[str, object]:
        kind = "text_completion"
        if self._of_chat:
            kind = "chat.completion.chunk" if self._body.stream else "chat.completion"
        return {
            "id": self._request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._serving.model_name,
        }

    def _usage(self, made: int) -> dict[str, int]:
        prompts = sum({choice.prompt: len(choice.request.prompt_ids) for choice in self._choices}.values())
        return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}

    def _choice_json(self, piece: _Piece, *, delta: bool = False) -> dict[str, object]:
        body, tokens = self._body, piece.tokens
        fields: dict[str, object] = {
            "index": piece.choice.index,
            "finish_reason": piece.finish_reason,
            "stop_reason": self._stop_reason(piece),
            "version_spans": spans_json(tokens.version_spans),
            "prompt_version": tokens.prompt_version,
        }
        if body.return_token_ids:
            fields["token_ids"] = tokens.token_ids.tolist()
            if not self._of_chat and not (delta and len(piece.choice.said) > 1):
                fields["prompt_token_ids"] = piece.choice.request.prompt_ids
        if isinstance(body, ChatBody):
            fields |= self._delta(body, piece) if delta else self._message(body, piece)
            fields["logprobs"] = {"content": self._chat_logprobs(tokens)} if body.logprobs else None
        else:
            fields["text"] = piece.text
            fields["logprobs"] = None if body.logprobs is None else self._plain_logprobs(piece)
        return fields

    def _stop_reason(self, piece: _Piece) -> int | str | None:
        """As vLLM has it: None for the model's own stop token."""
        if piece.choice.text.stopped:
            return piece.choice.text.stopped_by
        return piece.tokens.stop_token_id if piece.tokens.stop_token_id in self._body.stop_token_ids else None

    def _message(self, body: ChatBody, piece: _Piece) -> dict[str, object]:
        choice, replies = piece.choice, self._codec.replies
        text, tools = "".join(choice.said), body.offered_tools
        if replies is None or not (body.skip_special_tokens or tools):  # who wants special tokens wants all as it is
            return {"message": {"role": "assistant", "content": text}}
        message = replies.reply(
            choice.request.prompt_ids, choice.token_ids, text=text, stops=body.stop_strings, tools=tools,
            parallel=body.parallel_tool_calls is not False,
        )  # fmt: skip
        if "tool_calls" in message and piece.finish_reason == FinishReason.STOP:
            return {"message": message, "finish_reason": "tool_calls"}
        return {"message": message}

    def _delta(self, body: ChatBody, piece: _Piece) -> dict[str, object]:
        if not body.offered_tools:
            return {"delta": {"content": piece.text}}
        if piece.finish_reason is None:
            return {"delta": {}}
        whole = self._message(body, piece)
        message = whole.pop("message")
        assert isinstance(message, dict)
        delta = {key: value for key, value in message.items() if key != "role" and value is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": delta, **whole}

    def _name(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        raw = self._codec.bytes.of(token_id)
        text = raw.decode(errors="replace")
        if not self._of_chat and "\ufffd" in text:  # it has no `bytes` beside the name
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def _chat_logprobs(self, tokens: TokenChunk) -> list[dict[str, object]]:
        def entry(token_id: int, logprob: float) -> dict[str, object]:
            name, raw = self._name(token_id), self._codec.bytes.of(token_id)
            return {"token": name, "logprob": said(logprob), "bytes": list(raw)}

        sampled = zip(tokens.token_ids.tolist(), tokens.logprobs.tolist(), tokens.alternatives, strict=True)
        return [{**entry(*token), "top_logprobs": [entry(*top) for top in tops]} for *token, tops in sampled]

    def _plain_logprobs(self, piece: _Piece) -> dict[str, object]:
        """Parts of one character begin at the same place of the text."""
        tokens, choice = piece.tokens, piece.choice
        token_ids, logprobs = tokens.token_ids.tolist(), [said(each) for each in tokens.logprobs.tolist()]
        names = [self._name(token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(choice.offset)
            choice.offset += len(choice.offsets.push([token_id]))
        tops = [
            {self._name(token_id): said(each) for token_id, each in ranked}
            | {name: logprob}  # the one that was sampled, which may not be among the likeliest
            for ranked, name, logprob in zip(tokens.alternatives, names, logprobs, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
