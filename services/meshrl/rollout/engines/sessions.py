"""Keeps two facts of each agent's run that its trace lacks: which policy may sample it, and which version sampled each
token.

A session is found by the id of the agent's trace; `episodes` opens it, the model client writes each call into it,
`samples` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshrl.rollout.engines.engine_table import Requirement
from meshrl.wire.errors import MeshError
from meshrl.wire.types import VersionSpan
from meshrl.wire.types.routes import Routes, joined

if TYPE_CHECKING:
    from meshrl.rollout.engines.turns import DirectTurns

# Far apart modulo 2**63, the range that vLLM takes, so that neighbouring seeds of a group do not meet.
CALL_STRIDE = 0x1E3779B97F4A7C15
AGENT_STRIDE = 0x517CC1B727220A95


@dataclass(frozen=True)
class Call:
    """One model call. (start, end, version) spans cover its sampled tokens. `prompt_version` is the oldest version that
    computed the prompt, if the first span has another one. `routes` are the experts (N, L, K) of the last N of its
    `tokens`, prompt and completion, but the very last; None if none came."""

    completion_ids: Sequence[int]
    spans: tuple[tuple[int, int, int], ...]
    prompt_version: int | None = None
    routes: Routes | None = None
    tokens: NDArray[np.int32] | None = None  # (T,) with routes

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        return tuple(
            VersionSpan(start=start, end=end, version=version, prompt_version=None if number else self.prompt_version)
            for number, (start, end, version) in enumerate(self.spans)
        )


@dataclass
class Session:
    """One agent's run. `engine` is the URL that answered last; `failure` is why a model call could not be made.
    `group_id`: the rollouts of a group begin with the same prompt.

    `turns` takes its turns in this process; None before, or if they go over HTTP. `reachable`: set-up has come to its
    tool servers. `doing` is its wait afterwards, as reported by its harness or model call. `stream` numbers the agent
    runs of one rollout and `started` the model calls of this one: each call draws anew. `keeps_routes`: engines are
    asked for the experts of its tokens. `seq_len` is the environment's own longest sequence. `syncs` are the trace
    contexts of the commits that brought its versions. `scores_only`: nothing trains on its tokens, so the logprobs of
    any engine will do.
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
    turns: DirectTurns | None = None
    syncs: set[str] = field(default_factory=set)
    keeps_routes: bool = False
    group_id: str = ""

    def next_seed(self, seed: int) -> int:
        """The seed of the next model call of a rollout with `seed`: that itself for the first, others far apart."""
        number, self.started = self.started, self.started + 1
        return (seed + number * CALL_STRIDE + self.stream * AGENT_STRIDE) % 2**63

    def routes_from(self, prompt_ids: Sequence[int]) -> int:
        """The first token of a prompt without known routes."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        known = [
            min(_common(prompt, call.tokens), len(call.tokens) - 1) for call in self.calls if call.tokens is not None
        ]
        return max(known, default=0)

    def routes_of(self, token_ids: NDArray[np.int32]) -> Routes | None:
        """(T, L, K) of a sequence, from each call that began with the same tokens; None if no call brought any. The
        first call counts, as it sampled; missing routes are unknown."""
        parts: list[tuple[int, Routes | None]] = []
        end = 0
        for call in self.calls:
            if call.routes is None or call.tokens is None:
                continue
            known = min(_common(token_ids, call.tokens), len(call.tokens) - 1)
            start = len(call.tokens) - 1 - len(call.routes)
            if known <= max(start, end):
                continue
            parts.append((max(start - end, 0), None))
            parts.append((known - max(start, end), call.routes[max(start, end) - start : known - start]))
            end = known
        return joined([*parts, (len(token_ids) - end, None)])


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class SessionBook(dict[str, Session]):
    """The sessions of a model client, by the ids of the agents' traces."""

    def doing(self, session_id: str, what: str) -> None:
        """Notes the wait of the agent's harness; "" when that is over."""
        if (session := self.get(session_id)) is not None:
            session.doing = what

    def reachable(self, session_id: str) -> None:
        """The agent has got the address for its model calls; its tool servers start next."""
        if (session := self.get(session_id)) is not None:
            session.reachable = True
