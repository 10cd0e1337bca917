"""POST /inference/v1/generate: token ids in, sampled token ids with logprobs and version spans out.

The wire is vLLM's, as `renderers` reads it, with four fields more in each choice: `version_spans`
[[start, end, version], ...] over the completion, `prompt_version` (the oldest version that computed a part of the
prompt's KV cache, since weights may change before the first token), `completion_logprobs` (the logprobs packed as
base64 float32) and, on request (`extra_args.raw_logprobs`), `raw_logprobs`. Logprobs are those of the distribution
sampled from.

A client that sends `Accept: application/x-meshrl-completion` gets a completion frame instead (see
`meshrl.wire.completion_frame`), which costs no work per token. Streams, alternatives and prompt logprobs have none:
they are answered in JSON, so a client reads the Content-Type.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from meshrl.inference.engine import GenerateRequest
from meshrl.inference.http.results import Completion, frame_choice, join, prompt_logprobs_json, token_choice_json
from meshrl.inference.http.runs import Serving, frame_answer, gather, interleave, json_answer, send_events
from meshrl.inference.http.schemas import GenerateBody, parse
from meshrl.wire.completion_frame import MEDIA_TYPE, CompletionFrame
from meshrl.wire.errors import MeshError, Reason


class TokenRoute:
    """The token-in, token-out route."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = parse(GenerateBody, await request.read())
        requests = self._requests(body)
        if body.stream:
            return await send_events(self._serving, request, self._events(body, requests))
        async with self._serving.deadline():
            completions = await gather([self._serving.complete(each) for each in requests])
        request_id, version = requests[0].request_id, completions[0].version
        if body.sampling_params.fits_a_frame and MEDIA_TYPE in request.headers.get("Accept", ""):
            logprobs = body.sampling_params.logprobs is not None
            frame = CompletionFrame(
                request_id=request_id,
                prompt_tokens=len(body.token_ids),
                choices=tuple(frame_choice(completion, logprobs=logprobs) for completion in completions),
            )
            spans = [span for completion in completions for span in completion.version_spans]
            return frame_answer(frame, version, syncs=self._serving.spans.syncs(spans))
        return json_answer(self._answer(body, request_id, completions), version)

    def _requests(self, body: GenerateBody) -> list[GenerateRequest]:
        prompt_ids = tuple(body.token_ids)
        room = self._serving.room(len(prompt_ids))
        sampling = body.sampling_params
        request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
        return [
            GenerateRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling.params(
                    room=room, index=index, logprobs=sampling.logprobs is not None, top_logprobs=sampling.alternatives
                ),
                stream=body.stream,
            )
            for index in range(sampling.n)
        ]

    def _answer(self, body: GenerateBody, request_id: str, completions: list[Completion]) -> str:
        prompt_logprobs = None
        if body.sampling_params.prompt_logprobs is not None:
            first = completions[0]
            if first.prompt_logprobs is None:
                raise MeshError(Reason.NOT_SUPPORTED, "this engine reports no prompt_logprobs; leave them out")
            prompt_logprobs = prompt_logprobs_json(
                body.token_ids, first.prompt_logprobs, first.prompt_top_ids, first.prompt_top_logprobs
            )
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
        choices = [self._choice(body, index, completion) for index, completion in enumerate(completions)]
        return f'{json.dumps(fields)[:-1]},"choices":[{",".join(choices)}]}}'

    def _choice(self, body: GenerateBody, index: int, completion: Completion) -> str:
        sampling = body.sampling_params
        return token_choice_json(
            index, completion, logprobs=sampling.logprobs is not None, packed_only=sampling.packed_only
        )

    async def _events(self, body: GenerateBody, requests: list[GenerateRequest]) -> AsyncGenerator[str, None]:
        """One event a step and choice."""
        head = json.dumps({"request_id": requests[0].request_id, "model": self._serving.model_name})[:-1]
        async with aclosing(interleave(self._serving.spans, requests)) as chunks:
            async for index, chunk in chunks:
                yield f'{head},"choices":[{self._choice(body, index, join([chunk]))}]}}'
