"""Collects the chunks of one completion and says them in JSON; between the engine and the HTTP routes."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.inference.engine import FinishReason, TokenChunk
from meshrl.wire.types import VersionSpan

REMOVED_LOGPROB = -9999.0  # what vLLM says for a candidate that top_k, top_p or min_p removed: JSON has no infinity


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One completion, or a stretch of one when it is streamed: as `TokenChunk`, over all its tokens."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32] | None
    top_ids: NDArray[np.int32] | None
    top_logprobs: NDArray[np.float32] | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None

    @property
    def version(self) -> int | None:
        """Version that sampled the last token."""
        return self.version_spans[-1].version if self.version_spans else None


def join(chunks: Sequence[TokenChunk]) -> Completion:
    """Puts the chunks of a completion together, in order."""
    first, last = chunks[0], chunks[-1]
    spans: list[VersionSpan] = []
    for span in (span for chunk in chunks for span in chunk.version_spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(start=spans[-1].start, end=span.end, version=span.version)
        else:
            spans.append(span)
    return Completion(
        token_ids=first.token_ids if len(chunks) == 1 else np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=first.logprobs if len(chunks) == 1 else np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=_joined([chunk.raw_logprobs for chunk in chunks]),
        top_ids=_joined([chunk.top_ids for chunk in chunks]),
        top_logprobs=_joined([chunk.top_logprobs for chunk in chunks]),
        version_spans=tuple(spans),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )


def _joined(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def packed(values: NDArray[np.float32]) -> dict[str, Any]:
    """The packed form that `renderers` reads: base64 of little-endian float32."""
    data = base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
    return {"data": data, "shape": [len(values)], "dtype": "float32"}


def spans_json(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.start, span.end, span.version] for span in spans]


def weight_versions_json(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    """The same spans in the form of vLLM from 0.32 on."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def token_logprobs_json(completion: Completion) -> str:
    """`logprobs` of a token-in choice, as JSON text: written by hand, since this is a line for every token sampled."""
    token_ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
    if completion.top_ids is None or completion.top_logprobs is None:
        entries = [
            f'{{"token":"token_id:{token}","logprob":{logprob!r},"bytes":null,"top_logprobs":[]}}'
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ]
    else:
        tops = zip(completion.top_ids.tolist(), completion.top_logprobs.tolist(), strict=True)
        entries = [
            f'{{"token":"token_id:{token}","logprob":{logprob!r},"bytes":null,"top_logprobs":[{_tops(*top)}]}}'
            for token, logprob, top in zip(token_ids, logprobs, tops, strict=True)
        ]
    return f'{{"content":[{",".join(entries)}]}}'


def _tops(ids_K: Sequence[int], logprobs_K: Sequence[float]) -> str:
    return ",".join(
        f'{{"token":"token_id:{token}","logprob":{said(logprob)!r},"bytes":null}}'
        for token, logprob in zip(ids_K, logprobs_K, strict=True)
    )


def said(logprob: float) -> float:
    """A logprob as JSON can carry it."""
    return logprob if math.isfinite(logprob) else REMOVED_LOGPROB


def token_choice_json(index: int, completion: Completion, *, logprobs: bool, packed_only: bool) -> str:
    """One choice of the token-in route, as JSON text."""
    fields: dict[str, Any] = {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_token_id,
        "token_ids": completion.token_ids.tolist(),
        "version_spans": spans_json(completion.version_spans),
        "weight_versions": weight_versions_json(completion.version_spans),
    }
    if logprobs:
        fields["completion_logprobs"] = packed(completion.logprobs)
    if completion.raw_logprobs is not None:
        fields["raw_logprobs"] = packed(completion.raw_logprobs)
    content = token_logprobs_json(completion) if logprobs and not packed_only else "null"
    return f'{json.dumps(fields, separators=(",", ":"))[:-1]},"logprobs":{content}}}'
