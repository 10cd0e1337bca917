"""POST /inference/v1/generate: token ids in, sampled token ids with logprobs and version spans out.

The wire is vLLM's, as `renderers` reads it, with four more fields in each choice: `version_spans` [[start, end,
version],...], `prompt_version` (the oldest version that computed a part of the prompt's KV cache),
`completion_logprobs` (packed as base64 float32) and, on request (`extra_args.raw_logprobs`), `raw_logprobs`. A client
that sends `Accept: application/x-meshrl-completion` gets a completion frame (see `meshrl.wire.completion_frame`), which
costs no work per token, unless it asks for a stream, alternatives or prompt logprobs.
"""

from __future__ import annotations

import base64
import io
import json
import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import Field, JsonValue, model_validator

from meshrl.inference.engine import MAX_ALTERNATIVES, GenerateRequest, PromptLogprobs, TokenChunk
from meshrl.inference.http.request_keys import CHAT_KEYS, no_such_key, refusals, unknown
from meshrl.inference.http.runs import (
    SYNCS_HEADER,
    RequestBody,
    SamplingFields,
    Serving,
    gather,
    interleave,
    join,
    json_answer,
    said,
    send_events,
    spans_json,
    version_headers,
)
from meshrl.wire.completion_frame import MEDIA_TYPE, CompletionFrame, FrameChoice, encode
from meshrl.wire.errors import MeshError, Reason


class TokenSampling(SamplingFields):
    """`sampling_params` of the token-in route. `logprobs` 1 reports the sampled token, k > 1 also k alternatives; so do
    `prompt_logprobs` for the prompt's tokens."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if refused := refusals(self.other_keys, table=CHAT_KEYS):
            raise ValueError("; ".join(refused))
        if found := unknown(self.other_keys.keys() - CHAT_KEYS):
            raise ValueError("; ".join(no_such_key(name, type(self).model_fields) for name in found))
        return self

    @property
    def alternatives(self) -> int:
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0

    @property
    def packed_only(self) -> bool:
        """Whether the caller reads `completion_logprobs` and wants no JSON entry a token."""
        return bool((self.extra_args or {}).get("packed_logprobs"))

    @property
    def fits_a_frame(self) -> bool:
        return self.alternatives == 0 and self.prompt_logprobs is None


class GenerateBody(RequestBody):
    model: str | None = None
    request_id: str | None = None
    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    stream: bool = False
    return_token_ids: bool = False
    features: dict[str, JsonValue] | None = None
    content_parts: list[JsonValue] | None = None

    @model_validator(mode="after")
    def _served_here(self) -> Self:
        misplaced = [name for name in self.other_keys if name in TokenSampling.model_fields]
        found = [f"{name}: belongs into sampling_params" for name in misplaced] + refusals(self.other_keys)
        if found:
            raise ValueError("; ".join(found))
        if self.features or self.content_parts:
            raise ValueError("features and content_parts carry images or audio; this engine serves text models only")
        if self.sampling_params.stop_strings:
            raise ValueError("sampling_params.stop needs text, this route speaks token ids; use stop_token_ids")
        return self


class TokenRoute:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read(request, GenerateBody)
        prompt_ids = tuple(body.token_ids)
        sampling = body.sampling_params
        request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
        requests = [
            GenerateRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling.params(
                    most=self._serving.engine.max_model_len,
                    index=index,
                    logprobs=sampling.logprobs is not None,
                    top_logprobs=sampling.alternatives,
                    routes_from=sampling.routed_experts_prompt_start,
                ),
                stream=body.stream,
                policy=self._serving.policy(body.model, request.headers),
            )
            for index in range(sampling.n)
        ]
        if body.stream:
            return await send_events(self._serving, request, self._events(body, requests))
        async with self._serving.deadline():
            completions = await gather([self._serving.complete(each) for each in requests])
        version = completions[0].version
        if body.sampling_params.fits_a_frame and MEDIA_TYPE in request.headers.get("Accept", ""):
            logprobs = body.sampling_params.logprobs is not None
            frame = CompletionFrame(
                request_id=request_id,
                prompt_tokens=len(body.token_ids),
                choices=tuple(
                    FrameChoice(
                        token_ids=completion.token_ids,
                        logprobs=completion.logprobs if logprobs else None,
                        raw_logprobs=completion.raw_logprobs,
                        version_spans=completion.version_spans,
                        finish_reason=completion.finish_reason,
                        stop_token_id=completion.stop_token_id,
                        routed_experts=completion.routed_experts,
                    )
                    for completion in completions
                ),
            )
            spans = [span for completion in completions for span in completion.version_spans]
            headers = version_headers(version)
            if syncs := self._serving.spans.syncs(spans):
                headers[SYNCS_HEADER] = syncs
            return web.Response(body=encode(frame), content_type=MEDIA_TYPE, headers=headers)
        return json_answer(self._answer(body, request_id, completions), version)

    def _answer(self, body: GenerateBody, request_id: str, completions: list[TokenChunk]) -> str:
        prompt_logprobs = None
        if body.sampling_params.prompt_logprobs is not None:
            first = completions[0]
            if first.prompt_logprobs is None:
                raise MeshError(Reason.NOT_SUPPORTED, "this engine reports no prompt_logprobs; leave them out")
            prompt_logprobs = _prompt_logprobs(body.token_ids, first.prompt_logprobs)
        made = sum(len(completion.token_ids) for completion in completions)
        fields: dict[str, object] = {
            "request_id": request_id,
            "model": self._serving.model_name,
            "usage": {
                "prompt_tokens": len(body.token_ids),
                "completion_tokens": made,
                "total_tokens": len(body.token_ids) + made,
            },
            "prompt_logprobs": prompt_logprobs,
            "kv_transfer_params": None,
        }
        if body.return_token_ids:
            fields["prompt_token_ids"] = body.token_ids
        choices = enumerate(completions)
        fields["choices"] = [_choice(index, completion, body.sampling_params) for index, completion in choices]
        return json.dumps(fields, separators=(",", ":"))

    async def _events(self, body: GenerateBody, requests: list[GenerateRequest]) -> AsyncGenerator[str, None]:
        head = {"request_id": requests[0].request_id, "model": self._serving.model_name}
        async with aclosing(interleave(self._serving.spans, requests)) as chunks:
            async for index, chunk in chunks:
                choice = _choice(index, join([chunk]), body.sampling_params)
                yield json.dumps({**head, "choices": [choice]}, separators=(",", ":"))


def _choice(index: int, completion: TokenChunk, sampling: TokenSampling) -> dict[str, object]:
    spans = completion.version_spans
    fields: dict[str, object] = {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_token_id,
        "token_ids": completion.token_ids.tolist(),
        "version_spans": spans_json(spans),
        # the same as vLLM has them from 0.32 on
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in spans],
        "prompt_version": completion.prompt_version,
    }
    logprobs = sampling.logprobs is not None
    if logprobs:
        fields["completion_logprobs"] = _packed(completion.logprobs)
    if completion.raw_logprobs is not None:
        fields["raw_logprobs"] = _packed(completion.raw_logprobs)
    if completion.routed_experts is not None:  # (T, layers, experts), as vLLM says them: base64 of a .npy file
        file = io.BytesIO()
        np.save(file, completion.routed_experts, allow_pickle=False)
        fields["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    fields["logprobs"] = {"content": _logprobs(completion)} if logprobs and not sampling.packed_only else None
    return fields


def _packed(values: NDArray[np.float32]) -> dict[str, object]:
    """As `renderers` reads it: base64 of little-endian float32."""
    data = base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
    return {"data": data, "shape": [len(values)], "dtype": "float32"}


def _logprobs(completion: TokenChunk) -> list[dict[str, object]]:
    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": f"token_id:{token}", "logprob": said(logprob), "bytes": None}

    entries = map(entry, completion.token_ids.tolist(), completion.logprobs.tolist())
    tops = ([entry(*top) for top in ranked] for ranked in completion.alternatives)
    return [{**sampled, "top_logprobs": top} for sampled, top in zip(entries, tops, strict=True)]


def _prompt_logprobs(token_ids: Sequence[int], found: PromptLogprobs) -> list[dict[str, object] | None]:
    """As vLLM has them: an entry a token, none for the first, with the rank of alternatives."""

    def entry(logprob: float, rank: int | None) -> dict[str, object]:
        return {"logprob": said(logprob), "rank": rank, "decoded_token": None}

    made: list[dict[str, object] | None] = []
    for place, (token, logprob) in enumerate(zip(token_ids, found.logprobs.tolist(), strict=True)):
        if math.isnan(logprob):
            made.append(None)
            continue
        entries: dict[str, object] = {str(token): entry(logprob, None)}
        if found.top_ids is not None and found.top_logprobs is not None:
            ranked = zip(found.top_ids[place].tolist(), found.top_logprobs[place].tolist(), strict=True)
            entries |= {str(one): entry(value, rank) for rank, (one, value) in enumerate(ranked, 1)}
        made.append(entries)
    return made
