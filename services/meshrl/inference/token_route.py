"""POST /inference/v1/generate: token ids in, sampled token ids with logprobs and version spans out.

The wire is vLLM's, as `renderers` reads it, with three fields more in each choice: `version_spans`
[[start, end, version], ...] over the completion, `completion_logprobs` (the logprobs packed as base64 float32) and, on
request (`extra_args.raw_logprobs`), `raw_logprobs`. Logprobs are those of the distribution sampled from.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from meshrl.inference.bodies import GenerateBody, parse
from meshrl.inference.completion import Completion, join, token_choice_json
from meshrl.inference.engine import GenerateRequest
from meshrl.inference.serving import Serving, gather, interleave, json_answer, send_events


class TokenRoute:
    """The token-in, token-out route."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = parse(GenerateBody, await request.read())
        requests = self._requests(body)
        async with self._serving.deadline():
            if body.stream:
                return await send_events(request, self._events(body, requests), self._serving.engine.version)
            completions = await gather([self._serving.complete(each) for each in requests])
        return json_answer(self._answer(body, requests[0].request_id, completions), completions[0].version)

    def _requests(self, body: GenerateBody) -> list[GenerateRequest]:
        prompt_ids = tuple(body.token_ids)
        room = self._serving.room(len(prompt_ids))
        sampling = body.sampling_params
        request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
        return [
            GenerateRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling.params(room=room, index=index, top_logprobs=sampling.alternatives),
                stream=body.stream,
            )
            for index in range(sampling.n)
        ]

    def _answer(self, body: GenerateBody, request_id: str, completions: list[Completion]) -> str:
        made = sum(len(completion.token_ids) for completion in completions)
        fields: dict[str, Any] = {
            "request_id": request_id,
            "model": self._serving.model_name,
            "usage": {
                "prompt_tokens": len(body.token_ids),
                "completion_tokens": made,
                "total_tokens": len(body.token_ids) + made,
            },
            "prompt_logprobs": None,
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
        async with aclosing(interleave(self._serving.engine, requests)) as chunks:
            async for index, chunk in chunks:
                yield f'{head},"choices":[{self._choice(body, index, join([chunk]))}]}}'
