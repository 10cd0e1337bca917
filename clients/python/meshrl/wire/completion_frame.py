"""Completions as bytes, so that an engine sends sampled tokens to `rollout` without JSON for each.

The answer of POST /inference/v1/generate to `Accept: application/x-meshrl-completion`; docs/contract.md has the format.
Arrays of a decoded frame are views into its bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan
from meshrl.wire.types.routes import Routes

MEDIA_TYPE = "application/x-meshrl-completion"
FINISH_REASONS = (None, "stop", "length", "abort")
FORMAT = 1

_MAGIC = b"MRCF"
_HEADER = struct.Struct("<4sHHIIII")
_CHOICE = struct.Struct("<IIqBB6x")
_SPAN = struct.Struct("<IIq")
_PROMPT_VERSION = struct.Struct("<q")
_ROUTES = struct.Struct("<IHBB")
_LOGPROBS, _RAW_LOGPROBS, _HAS_PROMPT_VERSION, _HAS_ROUTES = 1, 2, 4, 8
_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameChoice:
    """Of T tokens; logprobs only if asked for."""

    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32] | None  # (T,) of the distribution sampled from
    raw_logprobs: NDArray[np.float32] | None = None  # (T,) of that before temperature and cuts
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str | None
    stop_token_id: int | None = None
    routed_experts: Routes | None = None  # (N, L, K) of the last N tokens of prompt and completion but the very last


@dataclass(frozen=True, kw_only=True, eq=False)
class CompletionFrame:
    request_id: str
    prompt_tokens: int
    choices: tuple[FrameChoice, ...]


def encode(frame: CompletionFrame) -> bytes:
    name = frame.request_id.encode()
    header = _HEADER.pack(_MAGIC, FORMAT, 0, len(frame.choices), frame.prompt_tokens, len(name), 0)
    parts = [header, name, bytes(-len(name) % 8)]
    for choice in frame.choices:
        count, kinds = len(choice.token_ids), 0
        arrays = [choice.token_ids.astype("<i4", copy=False).tobytes()]
        for bit, values in ((_LOGPROBS, choice.logprobs), (_RAW_LOGPROBS, choice.raw_logprobs)):
            if values is not None:
                if len(values) != count:
                    raise ValueError(f"a choice of {count} tokens needs as many logprobs, got {len(values)}")
                kinds |= bit
                arrays.append(values.astype("<f4", copy=False).tobytes())
        spans = choice.version_spans
        prompt_version = spans[0].prompt_version if spans else None
        if prompt_version is not None:
            kinds |= _HAS_PROMPT_VERSION
        if choice.routed_experts is not None:
            kinds |= _HAS_ROUTES
        stop = -1 if choice.stop_token_id is None else choice.stop_token_id
        finish = FINISH_REASONS.index(choice.finish_reason)
        parts.append(_CHOICE.pack(count, len(spans), stop, finish, kinds))
        parts.extend(_SPAN.pack(span.start, span.end, span.version) for span in spans)
        if prompt_version is not None:
            parts.append(_PROMPT_VERSION.pack(prompt_version))
        if choice.routed_experts is not None:
            routes = choice.routed_experts
            arrays.append(_ROUTES.pack(*routes.shape, routes.itemsize))
            arrays.append(routes.astype(routes.dtype.newbyteorder("<"), copy=False).tobytes())
        parts.extend(arrays)
    return b"".join(parts)


def decode(data: bytes) -> CompletionFrame:
    """Raises MeshError ENGINE_FAILED unless it is one whole frame."""
    try:
        magic, version, _, count, prompt_tokens, name_bytes, _ = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != FORMAT:
            raise ValueError(f"it starts with {magic!r}, format {version}; expected {_MAGIC!r}, format {FORMAT}")
        at = _HEADER.size + name_bytes
        request_id = data[_HEADER.size : at].decode()
        at += -name_bytes % 8
        choices = []
        for _ in range(count):
            choice, at = _take(data, at)
            choices.append(choice)
        if at != len(data):
            raise ValueError(f"it has {len(data)} bytes, its choices end at {at}")
    except (
        struct.error,
        ValueError,
        IndexError,
        KeyError,
    ) as error:  # numpy says ValueError for a buffer that is too short
        raise MeshError(Reason.ENGINE_FAILED, f"an engine's binary answer cannot be read: {error}") from error
    return CompletionFrame(request_id=request_id, prompt_tokens=prompt_tokens, choices=tuple(choices))


def _take(data: bytes, at: int) -> tuple[FrameChoice, int]:
    count, num_spans, stop, finish, kinds = _CHOICE.unpack_from(data, at)
    at += _CHOICE.size
    spans: list[VersionSpan] = []
    for _ in range(num_spans):
        start, end, version = _SPAN.unpack_from(data, at)
        spans.append(VersionSpan(start=start, end=end, version=version))
        at += _SPAN.size
    if kinds & _HAS_PROMPT_VERSION:
        spans[0] = replace(spans[0], prompt_version=_PROMPT_VERSION.unpack_from(data, at)[0])
        at += _PROMPT_VERSION.size
    token_ids = np.frombuffer(data, "<i4", count, at)
    at += count * _TOKEN_BYTES
    values: list[NDArray[np.float32] | None] = []
    for bit in (_LOGPROBS, _RAW_LOGPROBS):
        values.append(np.frombuffer(data, "<f4", count, at) if kinds & bit else None)
        at += count * _TOKEN_BYTES if kinds & bit else 0
    routes: Routes | None = None
    if kinds & _HAS_ROUTES:
        *shape, itemsize = _ROUTES.unpack_from(data, at)
        at += _ROUTES.size
        routes = np.frombuffer(data, {1: "u1", 2: "<i2"}[itemsize], math.prod(shape), at).reshape(shape)
        at += routes.nbytes
    choice = FrameChoice(
        token_ids=token_ids,
        logprobs=values[0],
        raw_logprobs=values[1],
        version_spans=tuple(spans),
        finish_reason=FINISH_REASONS[finish],
        stop_token_id=None if stop < 0 else stop,
        routed_experts=routes,
    )
    return choice, at
