"""POST /v1/chat/completions and /v1/completions: OpenAI's request formats for the same engine, whole or as a stream.

Beyond OpenAI's fields a choice carries `version_spans` and `prompt_version` (see `token_route`), and `token_ids` when
the request has `return_token_ids`. Where the model's renderer is known, a chat message has its `reasoning_content` and
`tool_calls` apart; a stream has them so with tools alone, in its last piece, and else the text as it is sampled.
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
    prompt_ids: tuple[int, ...]
    request: GenerateRequest
    text: TextStream
    offsets: TextStream  # the same text, of one token after the other
    offset: int = 0  # characters of it so far
    token_ids: list[int] = field(default_factory=list)  # sampled so far, without a stop token
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    choice: _Choice
    text: str
    tokens: TokenChunk
    finish_reason: str | None


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
        tops = (body.top_logprobs or 0) if body.logprobs else 0
        return await self._serve(request, body, self._choices(body, [prompt_ids], bool(body.logprobs), tops))

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
        choices = self._choices(body, prompts, body.logprobs is not None, body.logprobs or 0)
        return await self._serve(request, body, choices)

    def _choices(
        self, body: ChatBody | CompletionBody, prompts: Sequence[tuple[int, ...]], logprobs: bool, tops: int
    ) -> list[_Choice]:
        kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        request_id = f"{kind}-{uuid.uuid4().hex}"
        stops = body.stop_strings
        ends: tuple[int, ...] = ()
        if isinstance(body, ChatBody) and self._codec.replies is not None and not body.ignore_eos:
            ends = self._codec.replies.stop_token_ids
        choices: list[_Choice] = []
        most = self._serving.engine.max_model_len
        for prompt, prompt_ids in enumerate(prompts):
            for index in range(body.n):
                params = body.params(most=most, index=index, logprobs=logprobs, top_logprobs=tops)
                params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
                # with stop strings the text is watched as it grows, so the tokens must come one by one
                asked = GenerateRequest(
                    request_id=request_id,
                    prompt_ids=prompt_ids,
                    sampling=params,
                    stream=body.stream or bool(stops),
                    policy=self._serving.policy(body.model),
                )
                text = TextStream(self._codec, skip_special_tokens=body.skip_special_tokens, stops=stops)
                offsets = TextStream(self._codec, skip_special_tokens=body.skip_special_tokens)
                choices.append(_Choice(len(choices), prompt, prompt_ids, asked, text, offsets))
        return choices

    async def _serve(
        self, request: web.Request, body: ChatBody | CompletionBody, choices: list[_Choice]
    ) -> web.StreamResponse:
        if body.stream:
            return await send_events(self._serving, request, self._events(body, choices))
        async with self._serving.deadline():
            pieces = await gather([self._whole(choice) for choice in choices])
        answer = self._head(body, choices[0])
        answer["choices"] = [self._choice_json(body, piece) for piece in pieces]
        answer["usage"] = _usage(choices, sum(len(piece.tokens.token_ids) for piece in pieces))
        if body.return_token_ids:
            answer["prompt_token_ids"] = list(choices[0].prompt_ids)
        return json_answer(json.dumps(answer), pieces[0].tokens.version)

    async def _whole(self, choice: _Choice) -> _Piece:
        def stops(chunk: TokenChunk) -> bool:
            _added_text(choice, chunk)
            return choice.text.stopped

        tokens = await self._serving.complete(choice.request, ends=stops)
        reason = FinishReason.STOP if choice.text.stopped else tokens.finish_reason
        return _Piece(choice=choice, text="".join(choice.said), tokens=tokens, finish_reason=reason)

    # --- streams ----------------------------------------------------------------------------

    async def _events(self, body: ChatBody | CompletionBody, choices: list[_Choice]) -> AsyncGenerator[str, None]:
        made, ended, opened = 0, 0, False
        async with aclosing(interleave(self._serving.spans, [choice.request for choice in choices])) as chunks:
            async for index, chunk in chunks:
                if isinstance(body, ChatBody) and not opened:  # not before: a refusal is answered with its own status
                    opened = True
                    for each in choices:
                        yield self._event(body, each, {"delta": {"role": "assistant", "content": ""}})
                choice = choices[index]
                if choice.text.stopped:
                    continue
                text = _added_text(choice, chunk)
                made += len(chunk.token_ids)
                reason = FinishReason.STOP if choice.text.stopped else chunk.finish_reason
                piece = _Piece(choice=choice, text=text, tokens=join([chunk]), finish_reason=reason)
                ended += reason is not None
                yield self._event(body, choice, self._choice_json(body, piece, delta=True))
                if ended == len(choices):
                    break
        if body.stream_options is not None and body.stream_options.include_usage:
            yield json.dumps({**self._head(body, choices[0]), "choices": [], "usage": _usage(choices, made)})

    def _event(self, body: ChatBody | CompletionBody, choice: _Choice, fields: dict[str, object]) -> str:
        head = self._head(body, choice)
        return json.dumps({**head, "choices": [{"index": choice.index, "finish_reason": None, **fields}]})

    # --- shapes -----------------------------------------------------------------------------

    def _head(self, body: ChatBody | CompletionBody, choice: _Choice) -> dict[str, object]:
        kind = "text_completion"
        if isinstance(body, ChatBody):
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return {
            "id": choice.request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._serving.model_name,
        }

    def _choice_json(self, body: ChatBody | CompletionBody, piece: _Piece, *, delta: bool = False) -> dict[str, object]:
        fields: dict[str, object] = {"index": piece.choice.index, "finish_reason": piece.finish_reason}
        fields["stop_reason"] = _stop_reason(body, piece)
        fields["version_spans"] = spans_json(piece.tokens.version_spans)
        fields["prompt_version"] = piece.tokens.prompt_version
        if body.return_token_ids:
            fields["token_ids"] = piece.tokens.token_ids.tolist()
        if isinstance(body, ChatBody):
            fields |= self._delta(body, piece) if delta else self._message(body, piece)
            fields["logprobs"] = {"content": self._chat_logprobs(body, piece.tokens)} if body.logprobs else None
        else:
            fields["text"] = piece.text
            fields["logprobs"] = None if body.logprobs is None else self._plain_logprobs(body, piece)
        return fields

    def _message(self, body: ChatBody, piece: _Piece) -> dict[str, object]:
        choice, replies = piece.choice, self._codec.replies
        text, tools = "".join(choice.said), body.offered_tools
        if replies is None or not (body.skip_special_tokens or tools):  # who wants special tokens wants all as it is
            return {"message": {"role": "assistant", "content": text}}
        message = replies.reply(
            choice.prompt_ids, choice.token_ids, text=text, stops=body.stop_strings, tools=tools,
            parallel=body.parallel_tool_calls is not False,
        )  # fmt: skip
        if "tool_calls" in message and piece.finish_reason == FinishReason.STOP:
            return {"message": message, "finish_reason": "tool_calls"}
        return {"message": message}

    def _delta(self, body: ChatBody, piece: _Piece) -> dict[str, object]:
        """What a stream's event adds: with tools nothing until the end, since a call is known once it is whole."""
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

    def _name(self, body: ChatBody | CompletionBody, token_id: int) -> str:
        if body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        text = self._codec.token_text(token_id)
        if isinstance(body, CompletionBody) and "\ufffd" in text:  # it has no `bytes` beside the name
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._codec.bytes.of(token_id))
        return text

    def _chat_logprobs(self, body: ChatBody, tokens: TokenChunk) -> list[dict[str, object]]:
        def entry(token_id: int, logprob: float) -> dict[str, object]:
            name, raw = self._name(body, token_id), self._codec.bytes.of(token_id)
            return {"token": name, "logprob": said(logprob), "bytes": list(raw)}

        sampled = zip(tokens.token_ids.tolist(), tokens.logprobs.tolist(), tokens.alternatives, strict=True)
        return [{**entry(*token), "top_logprobs": [entry(*top) for top in tops]} for *token, tops in sampled]

    def _plain_logprobs(self, body: CompletionBody, piece: _Piece) -> dict[str, object]:
        """A token's offset is the place in the text where it begins; parts of one character begin at the same place."""
        tokens, choice = piece.tokens, piece.choice
        token_ids, logprobs = tokens.token_ids.tolist(), [said(each) for each in tokens.logprobs.tolist()]
        names = [self._name(body, token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(choice.offset)
            choice.offset += len(choice.offsets.push([token_id]))
        tops = None
        if tokens.top_ids is not None:
            tops = [
                {self._name(body, token_id): said(each) for token_id, each in ranked}
                | {name: logprob}  # the one that was sampled, which may not be among the likeliest
                for ranked, name, logprob in zip(tokens.alternatives, names, logprobs, strict=True)
            ]
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _stop_reason(body: ChatBody | CompletionBody, piece: _Piece) -> int | str | None:
    """As vLLM has it: the stop string or stop token of the request that ended the choice, None for the model's own."""
    if piece.choice.text.stopped:
        return piece.choice.text.stopped_by
    return piece.tokens.stop_token_id if piece.tokens.stop_token_id in (body.stop_token_ids or ()) else None


def _added_text(choice: _Choice, chunk: TokenChunk) -> str:
    token_ids = chunk.token_ids.tolist()
    if chunk.stop_token_id is not None:
        token_ids = token_ids[:-1]
    choice.token_ids += token_ids
    choice.said.append(choice.text.push(token_ids, last=chunk.finish_reason is not None))
    return choice.said[-1]


def _usage(choices: Sequence[_Choice], made: int) -> dict[str, int]:
    prompts = sum({choice.prompt: len(choice.prompt_ids) for choice in choices}.values())
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}
