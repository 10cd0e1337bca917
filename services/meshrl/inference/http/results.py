"""Puts the chunks of one completion together and writes it as JSON or as a frame; between the engine and the routes."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.inference.engine import FinishReason, TokenChunk
from meshrl.wire.completion_frame import FrameChoice
from meshrl.wire.types import VersionSpan

REMOVED_LOGPROB = -9999.0  # what vLLM says for a candidate that top_k, top_p or min_p removed: JSON has no infinity

Scalar = TypeVar("Scalar", bound=np.generic)


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
    prompt_logprobs: NDArray[np.float32] | None
    prompt_top_ids: NDArray[np.int32] | None
    prompt_top_logprobs: NDArray[np.float32] | None
    routed_experts: NDArray[np.generic] | None

    @property
    def version(self) -> int | None:
        """Version that sampled the last token."""
        return self.version_spans[-1].version if self.version_spans else None

    @property
    def prompt_version(self) -> int | None:
        """Oldest version that computed a part of the prompt's KV cache; None where this is no beginning."""
        if not self.version_spans or self.version_spans[0].start > 0:
            return None
        first = self.version_spans[0]
        return first.version if first.prompt_version is None else first.prompt_version


def join(chunks: Sequence[TokenChunk]) -> Completion:
    """Puts the chunks of a completion together, in order."""
    first, last = chunks[0], chunks[-1]
    spans: list[VersionSpan] = []
    for span in (span for chunk in chunks for span in chunk.version_spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=span.end)
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
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_ids=first.prompt_top_ids,
        prompt_top_logprobs=first.prompt_top_logprobs,
        routed_experts=_joined([chunk.routed_experts for chunk in chunks]),
    )


def _joined(parts: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return present[0] if len(present) == 1 else np.concatenate(present)


def packed(values: NDArray[np.float32]) -> dict[str, object]:
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
        ranked = zip(completion.top_ids.tolist(), completion.top_logprobs.tolist(), strict=True)
        tops = [
            ",".join(
                f'{{"token":"token_id:{token}","logprob":{said(logprob)!r},"bytes":null}}'
                for token, logprob in zip(ids_K, logprobs_K, strict=True)
            )
            for ids_K, logprobs_K in ranked
        ]
        entries = [
            f'{{"token":"token_id:{token}","logprob":{logprob!r},"bytes":null,"top_logprobs":[{top}]}}'
            for token, logprob, top in zip(token_ids, logprobs, tops, strict=True)
        ]
    return f'{{"content":[{",".join(entries)}]}}'


def said(logprob: float) -> float:
    """A logprob as JSON can carry it."""
    return logprob if math.isfinite(logprob) else REMOVED_LOGPROB


def prompt_logprobs_json(
    token_ids: Sequence[int],
    logprobs: NDArray[np.float32],
    top_ids: NDArray[np.int32] | None = None,
    top_logprobs: NDArray[np.float32] | None = None,
) -> list[dict[str, object] | None]:
    """Logprobs (P,) of the prompt's tokens as vLLM says them: an entry a token, none for the first.

    With alternatives (P, K) an entry also has the likeliest tokens in that place, with their rank.
    """

    def entry(logprob: float, rank: int | None) -> dict[str, object]:
        return {"logprob": said(logprob), "rank": rank, "decoded_token": None}

    made: list[dict[str, object] | None] = []
    for place, (token, logprob) in enumerate(zip(token_ids, logprobs.tolist(), strict=True)):
        if math.isnan(logprob):
            made.append(None)
            continue
        entries: dict[str, object] = {str(token): entry(logprob, None)}
        if top_ids is not None and top_logprobs is not None:
            ranked = zip(top_ids[place].tolist(), top_logprobs[place].tolist(), strict=True)
            entries |= {str(one): entry(value, rank) for rank, (one, value) in enumerate(ranked, 1)}
        made.append(entries)
    return made


def routed_experts_text(experts: NDArray[np.generic]) -> str:
    """Chosen experts (T, layers, experts) as vLLM says them: base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def frame_choice(completion: Completion, *, logprobs: bool) -> FrameChoice:
    """One choice of the token-in route, for a completion frame."""
    return FrameChoice(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs if logprobs else None,
        raw_logprobs=completion.raw_logprobs,
        version_spans=completion.version_spans,
        finish_reason=completion.finish_reason,
        stop_token_id=completion.stop_token_id,
    )


def token_choice_json(index: int, completion: Completion, *, logprobs: bool, packed_only: bool) -> str:
    """One choice of the token-in route, as JSON text."""
    fields: dict[str, object] = {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_token_id,
        "token_ids": completion.token_ids.tolist(),
        "version_spans": spans_json(completion.version_spans),
        "weight_versions": weight_versions_json(completion.version_spans),
        "prompt_version": completion.prompt_version,
    }
    if logprobs:
        fields["completion_logprobs"] = packed(completion.logprobs)
    if completion.raw_logprobs is not None:
        fields["raw_logprobs"] = packed(completion.raw_logprobs)
    if completion.routed_experts is not None:
        fields["routed_experts"] = routed_experts_text(completion.routed_experts)
    content = token_logprobs_json(completion) if logprobs and not packed_only else "null"
    return f'{json.dumps(fields, separators=(",", ":"))[:-1]},"logprobs":{content}}}'
