"""Reads an engine's answer to a model call: a completion frame, or JSON in our spelling or vLLM's. No I/O.

Fed by the model client with the router's bytes; the tokens go to verifiers and the spans to the session. T tokens of a
completion.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.rollout.engines.engine_rate import CallTiming
from meshrl.wire import completion_frame
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types.routes import MAX_NARROW_EXPERTS, Routes, narrowed
from meshrl.wire.values import JsonObject

ACCEPT = f"{completion_frame.MEDIA_TYPE}, application/json"
"""Sent with every call: an engine of ours answers with a frame, any other with JSON."""

MISSING_BELOW = -9999.0  # vLLM's word for "missing", since JSON has no infinity


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's answer to one call: its body, and the versions known before and after the tokens were sampled."""

    body: bytes
    version_before: int | None
    version_after: int | None
    media_type: str = "application/json"
    syncs: str = ""
    """Trace contexts of the commits that brought its versions, with commas between them."""
    timing: CallTiming | None = None


@dataclass(frozen=True, kw_only=True)
class SampledCompletion:
    """The tokens of one completion. Lists, because verifiers keeps lists; (start, end, version) spans cover them."""

    request_id: str
    token_ids: list[int]  # (T,)
    logprobs: list[float]  # (T,)
    spans: tuple[tuple[int, int, int], ...]
    finish_reason: str | None
    prompt_version: int | None = None
    """Oldest version that computed the prompt, where that is another than the one that sampled the first token."""
    routes: Routes | None = None
    """(N, L, K) experts of the last N tokens of prompt and completion but the very last, if requested."""


def read(answer: EngineAnswer) -> SampledCompletion:
    """The first completion of an answer. Raises MeshError ENGINE_FAILED when it cannot be read or lacks a logprob."""
    try:
        return _of_frame(answer) if answer.media_type == completion_frame.MEDIA_TYPE else _of_json(answer)
    except (ValueError, KeyError, IndexError, TypeError) as error:  # what odd JSON leads to
        raise MeshError(Reason.ENGINE_FAILED, f"an engine's answer cannot be read: {error!r}") from error


def _of_frame(answer: EngineAnswer) -> SampledCompletion:
    frame = completion_frame.decode(answer.body)
    choice = frame.choices[0]
    if choice.logprobs is None:
        raise ValueError("a frame without logprobs")
    _check(choice.logprobs, len(choice.token_ids))
    spans = tuple((span.start, span.end, span.version) for span in choice.version_spans)
    return SampledCompletion(
        request_id=frame.request_id,
        token_ids=choice.token_ids.tolist(),
        logprobs=choice.logprobs.tolist(),
        spans=spans or _assumed_spans(answer, len(choice.token_ids)),
        finish_reason=choice.finish_reason,
        prompt_version=choice.version_spans[0].prompt_version if choice.version_spans else None,
        routes=choice.routed_experts,
    )


def _of_json(answer: EngineAnswer) -> SampledCompletion:
    payload = json.loads(answer.body)
    choice = payload["choices"][0]
    token_ids = [int(token) for token in choice["token_ids"]]
    packed = choice.get("completion_logprobs")
    if packed is not None:
        logprobs_T = np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"])
    else:
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs_T = np.array([entry["logprob"] for entry in content], dtype=np.float32)
    _check(logprobs_T, len(token_ids))
    spans, prompt_version = _spans_of(choice), choice.get("prompt_version")
    return SampledCompletion(
        request_id=payload.get("request_id") or "",
        token_ids=token_ids,
        logprobs=logprobs_T.tolist(),
        spans=spans or _assumed_spans(answer, len(token_ids)),
        finish_reason=choice.get("finish_reason"),
        prompt_version=int(prompt_version) if spans and prompt_version not in (None, spans[0][2]) else None,
        routes=_routes_of(choice),
    )


def _routes_of(choice: JsonObject) -> Routes | None:
    """From vLLM's spelling: base64 of a .npy file of uint8 (up to 256 experts) or uint16."""
    if (packed := choice.get("routed_experts")) is None:
        return None
    chosen = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
    widest = MAX_NARROW_EXPERTS + (chosen.dtype != np.uint8 or int(chosen.max(initial=0)) >= MAX_NARROW_EXPERTS)
    return narrowed(chosen.astype(np.int64), widest)


def _check(logprobs_T: NDArray[np.floating], num_tokens: int) -> None:
    if len(logprobs_T) != num_tokens:
        raise ValueError(f"{len(logprobs_T)} logprobs for {num_tokens} sampled tokens")
    if not (np.isfinite(logprobs_T) & (logprobs_T > MISSING_BELOW)).all():
        raise ValueError("a sampled token has no finite logprob")


def _spans_of(choice: JsonObject) -> tuple[tuple[int, int, int], ...]:
    """A choice's spans, in our spelling or vLLM's; none if its versions are no numbers."""
    if ours := choice.get("version_spans"):
        return tuple((int(start), int(end), int(version or 0)) for start, end, version in ours)
    named = [(span["start"], span["end"], str(span["version"])) for span in choice.get("weight_versions") or ()]
    if all(version.isdigit() for _, _, version in named):
        return tuple((int(start), int(end), int(version)) for start, end, version in named)
    return ()


def _assumed_spans(answer: EngineAnswer, num_tokens: int) -> tuple[tuple[int, int, int], ...]:
    """For an engine that names no spans: the older of the versions known around the call."""
    if not num_tokens:
        return ()
    known = [version for version in (answer.version_before, answer.version_after) if version is not None]
    return ((0, num_tokens, min(known, default=0)),)
