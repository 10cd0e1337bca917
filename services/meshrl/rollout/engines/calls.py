"""A model call: an engine's answer, read from a completion frame or from JSON, and what an agent's run keeps of it.

`episodes` opens a session for each run, the model client writes its calls into it, and `samples` reads them: verifiers
keeps no versions in its traces. No I/O.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.prefixes import common_tokens
from meshrl.rollout.engines.engine_rate import CallTiming
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.wire import completion_frame
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan
from meshrl.wire.types.routes import MAX_NARROW_EXPERTS, Routes, joined, narrowed
from meshrl.wire.values import JsonObject

ACCEPT = f"{completion_frame.MEDIA_TYPE}, application/json"
"""An engine of ours answers with a frame, any other with JSON."""

MISSING_BELOW = -9999.0  # vLLM's word for "missing", since JSON has no infinity

# Far apart modulo 2**63, the range that vLLM takes, so that neighbouring seeds of a group do not meet.
CALL_STRIDE = 0x1E3779B97F4A7C15
AGENT_STRIDE = 0x517CC1B727220A95


@dataclass(frozen=True)
class EngineAnswer:
    body: bytes
    version_before: int | None
    version_after: int | None
    media_type: str = "application/json"
    syncs: str = ""
    """Trace contexts of the commits that brought its versions, joined by commas."""
    timing: CallTiming | None = None


@dataclass(frozen=True)
class Call:
    """An answered model call. Lists, because verifiers keeps lists. `version_spans` cover its sampled tokens. `routes`
    are the experts (N, L, K) of the last N of its `tokens`, prompt and completion, but the very last."""

    completion_ids: list[int]  # (T,)
    version_spans: tuple[VersionSpan, ...]
    routes: Routes | None = None
    tokens: NDArray[np.int32] | None = None  # with routes
    logprobs: list[float] = field(default_factory=list)  # (T,)
    finish_reason: str | None = None
    request_id: str = ""


def read(answer: EngineAnswer) -> Call:
    """The first completion. Raises MeshError ENGINE_FAILED when it cannot be read or lacks a logprob."""
    try:
        return _of_frame(answer) if answer.media_type == completion_frame.MEDIA_TYPE else _of_json(answer)
    except (ValueError, KeyError, IndexError, TypeError) as error:  # what odd JSON leads to
        raise MeshError(Reason.ENGINE_FAILED, f"an engine's answer cannot be read: {error!r}") from error


def _of_frame(answer: EngineAnswer) -> Call:
    frame = completion_frame.decode(answer.body)
    choice = frame.choices[0]
    if choice.logprobs is None:
        raise ValueError("a frame without logprobs")
    _check(choice.logprobs, len(choice.token_ids))
    return Call(
        request_id=frame.request_id,
        completion_ids=choice.token_ids.tolist(),
        logprobs=choice.logprobs.tolist(),
        version_spans=choice.version_spans or _assumed_spans(answer, len(choice.token_ids)),
        finish_reason=choice.finish_reason,
        routes=choice.routed_experts,
    )


def _of_json(answer: EngineAnswer) -> Call:
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
    return Call(
        request_id=payload.get("request_id") or "",
        completion_ids=token_ids,
        logprobs=logprobs_T.tolist(),
        version_spans=_spans_of(choice) or _assumed_spans(answer, len(token_ids)),
        finish_reason=choice.get("finish_reason"),
        routes=_routes_of(choice),
    )


def _routes_of(choice: JsonObject) -> Routes | None:
    """vLLM's spelling: base64 of a .npy file of uint8 (up to 256 experts) or uint16."""
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


def _spans_of(choice: JsonObject) -> tuple[VersionSpan, ...]:
    """In our spelling or vLLM's; none if its versions are no numbers."""
    named = choice.get("version_spans")
    if not named:
        named = [(span["start"], span["end"], str(span["version"])) for span in choice.get("weight_versions") or ()]
        if not all(version.isdigit() for _, _, version in named):
            return ()
    spans = [VersionSpan(start=int(start), end=int(end), version=int(version or 0)) for start, end, version in named]
    prompt_version = choice.get("prompt_version")
    if spans and prompt_version not in (None, spans[0].version):
        spans[0] = replace(spans[0], prompt_version=int(prompt_version))
    return tuple(spans)


def _assumed_spans(answer: EngineAnswer, num_tokens: int) -> tuple[VersionSpan, ...]:
    """The older of the versions known around the call."""
    if not num_tokens:
        return ()
    known = [version for version in (answer.version_before, answer.version_after) if version is not None]
    return (VersionSpan(start=0, end=num_tokens, version=min(known, default=0)),)


@dataclass
class Session:
    """One agent's run. `group_id`: the rollouts of a group begin with the same prompt.

    `engine` is the URL that answered last, `failure` why a call could not be made. `reachable`: set-up has come to its
    tool servers; `doing` is its wait afterwards. `stream` numbers the agent runs of one rollout and `started` the calls
    of this one, each of which draws anew. `keeps_routes`: engines are asked for the experts of its tokens. `seq_len` is
    the environment's own longest sequence. `syncs` are trace contexts of the commits that brought its versions.
    `scores_only`: nothing trains on its tokens, so any engine's logprobs will do.
    """

    requirement: Requirement = field(default_factory=Requirement)
    stop_token_ids: tuple[int, ...] = ()
    traceparent: str = ""
    stream: int = 0
    started: int = 0
    engine: str | None = None
    calls: list[Call] = field(default_factory=list)
    failure: MeshError | None = None
    scores_only: bool = False
    reachable: bool = False
    doing: str = ""
    seq_len: int | None = None
    syncs: set[str] = field(default_factory=set)
    keeps_routes: bool = False
    group_id: str = ""

    def next_seed(self, seed: int) -> int:
        """The seed of the next model call: `seed` itself for the first, others far apart."""
        number, self.started = self.started, self.started + 1
        return (seed + number * CALL_STRIDE + self.stream * AGENT_STRIDE) % 2**63

    def routes_from(self, prompt_ids: Sequence[int]) -> int:
        """The first token of a prompt without known routes."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        known = [
            min(common_tokens(prompt, call.tokens), len(call.tokens) - 1)
            for call in self.calls
            if call.tokens is not None
        ]
        return max(known, default=0)

    def routes_of(self, token_ids: NDArray[np.int32]) -> Routes | None:
        """(T, L, K) of a sequence, from the calls that began with the same tokens; None if no call brought any. The
        first call counts, as it sampled; missing routes are unknown."""
        parts: list[tuple[int, Routes | None]] = []
        end = 0
        for call in self.calls:
            if call.routes is None or call.tokens is None:
                continue
            known = min(common_tokens(token_ids, call.tokens), len(call.tokens) - 1)
            start = len(call.tokens) - 1 - len(call.routes)
            if known <= max(start, end):
                continue
            parts.append((max(start - end, 0), None))
            parts.append((known - max(start, end), call.routes[max(start, end) - start : known - start]))
            end = known
        return joined([*parts, (len(token_ids) - end, None)])


class SessionBook(dict[str, Session]):
    def doing(self, session_id: str, what: str) -> None:
        """Notes the wait of the agent's harness; "" ends it."""
        if (session := self.get(session_id)) is not None:
            session.doing = what
