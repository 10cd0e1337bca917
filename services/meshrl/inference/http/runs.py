"""Runs the completions of one HTTP request on the engine: checks its keys, keeps its deadline, joins their chunks.

Routes read the keys that have a field in their body; `request_keys` decides about all others. A key of no known API is
refused in `sampling_params`, and logged on the text routes, whose clients send more.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from aiohttp import web
from loguru import logger
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from meshrl.inference.engine import (
    MAX_ALTERNATIVES,
    Engine,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from meshrl.inference.http.request_keys import UNCONSTRAINED, no_such_key, refusals, unknown
from meshrl.inference.http.spans import CompletionSpans
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan

RUN_HEADER = "X-Policy-Run"
VERSION_HEADER = "X-Policy-Version"
SYNCS_HEADER = "X-Policy-Syncs"
"""Trace contexts of the commits that brought an answer's versions, with commas between them."""
UNFINISHED = "the engine ended this completion without a reason; send it again"

REMOVED_LOGPROB = -9999.0  # what vLLM says for a candidate that top_k, top_p or min_p removed: JSON has no infinity

MOST_UNKNOWN = 1000
"""That are logged."""

EXTRA_ARGS = ("raw_logprobs", "packed_logprobs", "prl_compact_logprobs")
"""The last one is a hint of the renderers package's client, which takes the plain form from a server without it."""

MAX_COMPLETIONS = 128
_SEED_STRIDE = 0x9E3779B97F4A7C15  # completions of one request draw from streams far apart

_AS_THEY_ARE = (
    "temperature", "top_p", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
"""Keys that requests and `SamplingParams` have in the same form."""

Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
Parsed = TypeVar("Parsed", bound=BaseModel)
Body = TypeVar("Body", bound="RequestBody")
Result = TypeVar("Result")
Scalar = TypeVar("Scalar", bound=np.generic)


class RequestBody(BaseModel):
    """Keeps other keys, to be checked. A null key has its default."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        defaults = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}
        nullable = {"max_tokens"}  # without a limit, which is not the default of every route
        return {
            name: value
            for name, value in keys.items()
            if value is not None or name in nullable or defaults.get(name, ...) in (None, ...)
        }

    @property
    def other_keys(self) -> dict[str, JsonValue]:
        return self.model_extra or {}


class SamplingFields(RequestBody):
    """Keys of every route, in vLLM's names and with its neutral values."""

    n: int = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    logit_bias: dict[int, Bias] = {}
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    extra_args: dict[str, JsonValue] | None = None
    response_format: JsonValue = None
    structured_outputs: JsonValue = None

    @model_validator(mode="after")
    def _samples_as_asked(self) -> Self:
        found = refusals(self.other_keys, n=self.n)
        if self.response_format not in (None, {"type": "text"}):
            found.append(f"response_format is not supported: {UNCONSTRAINED}")
        if self.structured_outputs:
            found.append(f"structured_outputs is not supported: {UNCONSTRAINED}")
        others = [name for name in self.extra_args or {} if name not in EXTRA_ARGS]
        found += [f"extra_args.{no_such_key(name, EXTRA_ARGS)}" for name in others]
        if "" in self.stop_strings:
            found.append("stop: an empty text ends every completion before its first token; leave it out")
        most = self.most_tokens
        if most is not None and self.min_tokens > most:
            found.append(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {most}; lower it")
        if found:
            raise ValueError("; ".join(found))
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(
        self, *, most: int, index: int, logprobs: bool, top_logprobs: int, routes_from: int | None = None
    ) -> SamplingParams:
        """Parameters of the index-th completion, of `most` tokens without max_tokens. Without `logprobs` an engine may
        be much faster."""
        raw_logprobs = bool((self.extra_args or {}).get("raw_logprobs"))
        return SamplingParams(
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            max_tokens=self.most_tokens or most,
            top_k=max(self.top_k, 0),
            stop_token_ids=tuple(self.stop_token_ids),
            seed=None if self.seed is None else (self.seed + index * _SEED_STRIDE) % 2**64,
            logprobs=logprobs or raw_logprobs,
            top_logprobs=top_logprobs,
            raw_logprobs=raw_logprobs,
            routed_experts_prompt_start=routes_from,
        )


def parse(kind: type[Parsed], raw: bytes) -> Parsed:
    """Raises MeshError INVALID_REQUEST that lists every violation with its key."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = [
            f"{'.'.join(str(part) for part in each['loc']) or 'body'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise MeshError(Reason.INVALID_REQUEST, "; ".join(found[:10])) from error


def join(chunks: Sequence[TokenChunk]) -> TokenChunk:
    first, last = chunks[0], chunks[-1]
    spans: list[VersionSpan] = []
    for span in (span for chunk in chunks for span in chunk.version_spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=span.end)
        else:
            spans.append(span)
    if len(chunks) == 1:
        return replace(first, version_spans=tuple(spans))
    return replace(
        first,
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=_joined([chunk.raw_logprobs for chunk in chunks]),
        top_ids=_joined([chunk.top_ids for chunk in chunks]),
        top_logprobs=_joined([chunk.top_logprobs for chunk in chunks]),
        version_spans=tuple(spans),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        routed_experts=last.routed_experts,
        times=last.times,
    )


def _joined(parts: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


class Serving:
    def __init__(self, engine: Engine, *, model_name: str, request_deadline_s: float) -> None:
        self.engine = engine
        self.model_name = model_name
        self.request_deadline_s = request_deadline_s
        self.spans = CompletionSpans(engine, model_name)
        self._unknown: set[str] = set()

    async def read(self, request: web.Request, kind: type[Body]) -> Body:
        body = parse(kind, await request.read())
        self.note_unknown(request.path, body.other_keys)
        return body

    def note_unknown(self, path: str, keys: Iterable[str]) -> None:
        for name in unknown(keys):
            if name not in self._unknown and len(self._unknown) < MOST_UNKNOWN:
                self._unknown.add(name)
                logger.warning(f"{path}: the key {name!r:.100} is not known and changes nothing; this is logged once")

    def policy(self, model: str | None, headers: Mapping[str, str] = MappingProxyType({})) -> str:
        """The run, or `RUN@VERSION`, that a request names as its model; empty for any other name.

        `RUN@` is a run for certain, and waits for its first version; a plain name is a run if it is served. A run's
        header decides if the engine serves adapters, or has no version at all yet.
        """
        if self.engine.adapters is None:
            return ""
        runs = self.engine.runs
        run_id = headers.get(RUN_HEADER, "")
        if run_id and "@" not in (model or "") and (runs or self.engine.version is None):
            return f"{run_id}@"
        if not model or model == self.model_name:
            return ""
        return model if "@" in model or model in runs else ""

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Bounds the block. Raises MeshError DEADLINE_PASSED once the request took too long."""
        limit = asyncio.timeout(self.request_deadline_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # another wait's, inside
                raise
            raise MeshError(
                Reason.DEADLINE_PASSED,
                f"the request took longer than request_deadline_s ({self.request_deadline_s:g} s) and was cancelled",
            ) from error

    async def complete(
        self, request: GenerateRequest, *, ends: Callable[[TokenChunk], bool] = lambda chunk: False
    ) -> TokenChunk:
        """Up to the first chunk for which `ends` is true. Raises MeshError DRAINING when it was cut by a shutdown,
        ENGINE_FAILED when its last chunk is missing."""
        chunks: list[TokenChunk] = []
        async with aclosing(self.spans.generate(request)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if ends(chunk):
                    return join(chunks)
        if not chunks or chunks[-1].finish_reason is None:
            raise MeshError(Reason.ENGINE_FAILED, UNFINISHED)
        if chunks[-1].finish_reason is FinishReason.ABORT:
            raise MeshError(Reason.DRAINING, "the engine shut down before this completion was finished; send it again")
        return join(chunks)


def served_version(engine: Engine) -> int | None:
    """Of the only run, or else of the base model."""
    runs = engine.runs
    return next(iter(runs.values())).version if len(runs) == 1 else engine.version


async def gather(calls: list[Awaitable[Result]]) -> list[Result]:
    """All results in order; the first failure cancels the rest."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Future[Result]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def interleave(
    spans: CompletionSpans, requests: list[GenerateRequest]
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Chunks as they come, each with the index of its request. The first failure is raised at once and ends the
    others."""
    ready: asyncio.Queue[tuple[int, TokenChunk] | Exception] = asyncio.Queue()

    async def pump(index: int, request: GenerateRequest) -> None:
        finished = False
        try:
            async with aclosing(spans.generate(request)) as chunks:
                async for chunk in chunks:
                    finished = chunk.finish_reason is not None
                    ready.put_nowait((index, chunk))
            if not finished:
                raise MeshError(Reason.ENGINE_FAILED, UNFINISHED)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task before the end: the reader raises it
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, request)) for index, request in enumerate(requests)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await ready.get()  # bounded by the request's deadline
            if isinstance(item, Exception):
                raise item
            open_streams -= item[1].finish_reason is not None
            yield item
    finally:
        await cancel(tasks)


def said(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else REMOVED_LOGPROB


def spans_json(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.start, span.end, span.version] for span in spans]


def json_answer(text: str, version: int | None) -> web.Response:
    return web.Response(text=text, content_type="application/json", headers=version_headers(version))


def version_headers(version: int | None) -> dict[str, str]:
    return {} if version is None else {VERSION_HEADER: str(version)}


async def send_events(serving: Serving, request: web.Request, events: AsyncGenerator[str, None]) -> web.StreamResponse:
    """Within the request's deadline, ended by [DONE].

    An error before the first event is raised. A later one is the last event, in the shape of the error body, and the
    connection is closed without [DONE].
    """
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers | version_headers(served_version(serving.engine)))
    try:
        async with aclosing(events), serving.deadline():
            first = await anext(events)
            await response.prepare(request)
            await _send(response, first)
            async for event in events:
                await _send(response, event)
            await _send(response, "[DONE]")
    except ConnectionError:  # the client has left, so there is nobody to tell
        logger.debug("the client of {} left before the end of its stream", request.path)
    except Exception as error:  # whatever it is, the client hears of it: in an answer, or as the stream's last event
        if not response.prepared:
            raise
        response.force_close()
        await _send(response, json.dumps(error_body(as_mesh_error(error, request))))
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, event: str) -> None:
    await response.write(f"data: {event}\n\n".encode())


def as_mesh_error(error: Exception, request: web.Request) -> MeshError:
    """Any error but a MeshError is a defect here and is logged."""
    if isinstance(error, MeshError):
        return error
    logger.opt(exception=error).error("{} {} failed", request.method, request.path)
    return MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}")


STATUS_OF: dict[Reason, int] = {
    Reason.INVALID_REQUEST: 400,
    Reason.NOT_SUPPORTED: 400,
    Reason.LAYOUT_MISMATCH: 400,
    Reason.OVERLOADED: 429,
    Reason.RUN_LIMIT_REACHED: 409,
    Reason.VERSION_SUPERSEDED: 410,
    Reason.UNREACHABLE: 502,
    Reason.DRAINING: 503,
    Reason.VERSION_NOT_AVAILABLE: 503,
    Reason.ENGINE_FAILED: 503,
    Reason.DEADLINE_PASSED: 504,
}


def error_body(error: MeshError) -> dict[str, object]:
    status = STATUS_OF.get(error.reason, 500)
    kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "server_error")
    return {
        "error": {
            "message": error.message, "type": kind, "param": None, "code": status, "reason": error.reason.name,
        }
    }  # fmt: skip
