"""Decides which request has which slot and what each step computes.

Pure logic over arrays. Slots [0, decoding) decode, [decoding, occupied) are being prefilled, the rest is free; rows
move to keep this order, which makes a step's cache reads one contiguous block. All prompt tokens but the last are
prefilled; the last is the first to be decoded. Shapes: S slots, M tokens a slot, R decoding rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.inference.engine import FinishReason, GenerateRequest, RequestTimes, TokenChunk
from meshrl.wire.errors import MeshError
from meshrl.wire.types import VersionSpan
from meshrl.wire.types.routes import Routes

MIN_SHARED_TOKENS = 8  # a shorter common prefix is cheaper to compute than to copy

_SLOT_DTYPE = np.dtype(
    [
        ("cached", np.int64),  # tokens whose keys and values are in the cache
        ("prompt", np.int64),
        ("generated", np.int64),
        ("limit", np.int64),
        ("min_tokens", np.int64),
        ("key", np.uint64),
        ("streams", np.bool_),
        ("shareable", np.bool_),  # every cached token was computed by the live weights
        ("adapter", np.int64),  # number of its adapter; 0: the base model
        ("coming", np.int64),  # cached tokens after the step being planned, for rows that prefill in it
    ]
)


class SlotStore(Protocol):
    """Something kept of the first `length` tokens of each slot."""

    def copy_slot(self, source: int, target: int, length: int) -> None: ...

    def swap_slots(self, one: int, other: int, length: int) -> None: ...


@dataclass(eq=False)
class RequestRow:
    """`deliver` and `fail` are called on the engine's thread."""

    request: GenerateRequest
    stop_ids: tuple[int, ...]
    key: np.uint64
    limit: int
    deliver: Callable[[TokenChunk], None]
    fail: Callable[[MeshError], None]
    adapter: int = 0  # its number; 0: the base model
    adapter_version: int | None = None
    slot: int = -1  # -1: waiting or gone
    sent: int = 0
    spans: list[list[int]] = field(default_factory=list)  # [first token, version]
    prompt_version: int | None = None  # that computed the first part of the prompt, once the weights changed after it
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)  # where the request asks for them
    alternatives: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)
    came_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0  # when its first token was there

    def times(self, now_s: float) -> RequestTimes:
        return RequestTimes(
            queue_s=self.started_s - self.came_s, prefill_s=self.first_s - self.started_s, decode_s=now_s - self.first_s
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillPiece:
    row: RequestRow
    start: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """A sampled token of each decoding row."""

    token_ids: NDArray[np.int64]  # (R,)
    logprobs: NDArray[np.float32]  # (R,) of the processed distribution
    raw_logprobs: NDArray[np.float32] | None  # (R,)
    top_ids: NDArray[np.int64] | None  # (R, K)
    top_logprobs: NDArray[np.float32] | None  # (R, K)


class SlotTable:
    """`now` gives seconds for requests' times."""

    def __init__(
        self, *, num_slots: int, max_len: int, stores: Sequence[SlotStore], now: Callable[[], float],
        routes_of: Callable[[int, int, int], Routes] | None = None,
    ) -> None:  # fmt: skip
        """`routes_of` gives the kept routes of a slot's tokens [start, end)."""
        self._now = now
        self._routes_of = routes_of
        self.num_slots = num_slots
        self.decoding = 0
        self.occupied = 0
        self.waiting: deque[RequestRow] = deque()
        self.rows: list[RequestRow] = []  # by slot
        self.changed = True  # a decoding row joined, left or moved since the parameters were last read
        self.shared_prompt_tokens = 0
        self.slots = np.zeros(num_slots, _SLOT_DTYPE)
        self.tokens_SM = np.zeros((num_slots, max_len + 1), np.int32)
        self.stop_SW = np.full((num_slots, 4), -1, np.int64)
        self._stores = stores

    # --- joining ----------------------------------------------------------------------------

    def schedule(self, budget: int) -> list[PrefillPiece]:
        """Seats waiting requests, starts to decode those with their prompt in the cache, and picks up to `budget`
        prompt tokens."""
        while self.waiting and self.occupied < self.num_slots:
            self._start(self.waiting.popleft())
        pieces: list[PrefillPiece] = []
        self.slots["coming"][: self.occupied] = 0
        for row in self.rows[self.decoding : self.occupied]:
            piece = self._next_piece(row, budget)
            if piece is not None:
                pieces.append(piece)
                budget -= len(piece.tokens)
                self.slots["coming"][row.slot] = piece.start + len(piece.tokens)
        return pieces

    def prefilled(self, pieces: Sequence[PrefillPiece]) -> None:
        """Records that the cache holds these pieces: before `absorb`, which may move their rows."""
        for piece in pieces:
            self.slots["cached"][piece.row.slot] += len(piece.tokens)

    def _start(self, row: RequestRow) -> None:
        slot = self.occupied
        self.slots[slot] = (
            0, len(row.request.prompt_ids), 0, row.limit, row.request.sampling.min_tokens, row.key, row.request.stream,
            True, row.adapter, 0,
        )  # fmt: skip
        self.tokens_SM[slot, : len(row.request.prompt_ids)] = row.request.prompt_ids
        if len(row.stop_ids) > self.stop_SW.shape[1]:
            wider = np.full((self.num_slots, len(row.stop_ids)), -1, np.int64)
            wider[:, : self.stop_SW.shape[1]] = self.stop_SW
            self.stop_SW = wider
        self.stop_SW[slot] = -1
        self.stop_SW[slot, : len(row.stop_ids)] = row.stop_ids
        row.slot = slot
        row.started_s = self._now()
        self.rows.append(row)
        self.occupied += 1

    def _next_piece(self, row: RequestRow, budget: int) -> PrefillPiece | None:
        slot, cached = row.slot, int(self.slots["cached"][row.slot])
        wanted = int(self.slots["prompt"][slot]) - 1
        if cached == 0 and wanted >= MIN_SHARED_TOKENS:
            source, common, coming = self._longest_prefix(slot, wanted)
            if coming >= max(common + 1, MIN_SHARED_TOKENS):
                return None  # a row of this very step computes more of it: copy from there in the next one
            if common >= MIN_SHARED_TOKENS:
                for store in self._stores:
                    store.copy_slot(source, slot, common)
                self.shared_prompt_tokens += common
                cached = self.slots["cached"][slot] = common
        if cached >= wanted:
            self._swap(slot, self.decoding)
            self.decoding += 1
            self.changed = True
            return None
        length = min(wanted - cached, budget)
        if length <= 0:
            return None
        return PrefillPiece(row=row, start=cached, tokens=self.tokens_SM[slot, cached : cached + length].copy())

    def _longest_prefix(self, slot: int, wanted: int) -> tuple[int, int, int]:
        """(source slot, tokens it can give now, tokens that a row of this step will be able to give)."""
        prompt = self.tokens_SM[slot, :wanted]
        live = self.slots[: self.occupied]
        alike = live["shareable"] & (live["adapter"] == live["adapter"][slot])
        candidates = np.flatnonzero(alike & (self.tokens_SM[: self.occupied, 0] == prompt[0]))
        candidates = candidates[candidates != slot]
        if not len(candidates):
            return -1, 0, 0
        differs = self.tokens_SM[candidates, :wanted] != prompt
        common = np.where(differs.any(1), differs.argmax(1), wanted)
        now = np.minimum(common, live["cached"][candidates])
        best = int(now.argmax())
        return int(candidates[best]), int(now[best]), int(np.minimum(common, live["coming"][candidates]).max())

    # --- decoding ---------------------------------------------------------------------------

    def decode_inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(R,) tokens to feed and their positions."""
        rows = self.decoding
        positions_R = self.slots["cached"][:rows].copy()
        return self.tokens_SM[np.arange(rows), positions_R].astype(np.int64), positions_R

    def sequence(self, slot: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        prompt, made = int(self.slots["prompt"][slot]), int(self.slots["generated"][slot])
        tokens_M = self.tokens_SM[slot]
        return tokens_M[:prompt], tokens_M[prompt : prompt + made]

    def absorb(self, output: StepOutput, version: int) -> list[tuple[RequestRow, FinishReason | None]]:
        """Records one sampled token for each decoding row; removes and returns the finished rows. One whose logprob is
        not finite has reason None: the caller fails it."""
        rows = self.decoding
        index = np.arange(rows)
        live = self.slots[:rows]
        live["cached"] += 1
        self.tokens_SM[index, live["cached"]] = output.token_ids
        for row, logprob in zip(self.rows, output.logprobs.tolist(), strict=False):
            row.logprobs.append(logprob)
        if output.raw_logprobs is not None:
            for row, logprob in zip(self.rows, output.raw_logprobs.tolist(), strict=False):
                row.raw_logprobs.append(logprob)
        if output.top_ids is not None and output.top_logprobs is not None:
            for row in self.rows[:rows]:
                if wanted := row.request.sampling.top_logprobs:
                    ids_K = output.top_ids[row.slot, :wanted].astype(np.int32)
                    row.alternatives.append((ids_K, output.top_logprobs[row.slot, :wanted].copy()))
        for slot in np.flatnonzero(live["generated"] == 0):
            row = self.rows[slot]
            row.spans = [[0, version if row.adapter_version is None else row.adapter_version]]
            row.first_s = self._now()
        live["generated"] += 1
        stopped = (self.stop_SW[:rows] == output.token_ids[:, None]).any(1) & (live["generated"] > live["min_tokens"])
        broken = ~np.isfinite(output.logprobs)
        done = stopped | (live["generated"] >= live["limit"]) | broken
        for slot in np.flatnonzero(live["streams"] & ~done):
            self.rows[slot].deliver(self.chunk(self.rows[slot], None))
        left: list[tuple[RequestRow, FinishReason | None]] = []
        for slot in np.flatnonzero(done)[::-1]:  # from the back, so that a hole is filled by a row that stays
            row = self.rows[slot]
            reason = None if broken[slot] else FinishReason.STOP if stopped[slot] else FinishReason.LENGTH
            if reason is not None:
                row.deliver(self.chunk(row, reason))
            self.remove(row)
            left.append((row, reason))
        return left

    def chunk(self, row: RequestRow, reason: FinishReason | None) -> TokenChunk:
        if row.slot < 0:
            empty = np.zeros(0, np.float32)
            return TokenChunk(start=row.sent, token_ids=empty.astype(np.int32), logprobs=empty, finish_reason=reason)
        start, end = row.sent, int(self.slots["generated"][row.slot])
        first = int(self.slots["prompt"][row.slot])
        token_ids = self.tokens_SM[row.slot, first + start : first + end].copy()
        row.sent = end
        params = row.request.sampling
        tops = row.alternatives[start:end] if params.top_logprobs else None
        routes = None
        if reason is not None and self._routes_of is not None and params.routed_experts_prompt_start is not None:
            cached = int(self.slots["cached"][row.slot])
            routes = self._routes_of(row.slot, params.routed_experts_prompt_start, cached)
        return TokenChunk(
            start=start,
            token_ids=token_ids,
            logprobs=np.array(row.logprobs[start:end], np.float32),
            raw_logprobs=np.array(row.raw_logprobs[start:end], np.float32) if params.raw_logprobs else None,
            top_ids=np.stack([ids for ids, _ in tops]) if tops else None,
            top_logprobs=np.stack([logprobs for _, logprobs in tops]) if tops else None,
            version_spans=_spans(row, start, end),
            finish_reason=reason,
            stop_token_id=int(token_ids[-1]) if reason is FinishReason.STOP else None,
            routed_experts=routes,
            times=None if reason is None else row.times(self._now()),
        )

    # --- leaving and moving -----------------------------------------------------------------

    def remove(self, row: RequestRow) -> None:
        if row.slot < 0:
            if row in self.waiting:
                self.waiting.remove(row)
            return
        if row.slot < self.decoding:
            self._swap(row.slot, self.decoding - 1)
            self.decoding -= 1
            self.changed = True
        self._swap(row.slot, self.occupied - 1)
        self.occupied -= 1
        self.rows.pop()
        row.slot = -1

    def new_weights(self, version: int, *, before: int | None, same: bool = False) -> None:
        """Rows go on with their cache, which new rows no longer copy; those with an adapter keep its version. `before`
        is the version until now. `same`: only the name changed."""
        if not same:
            self.slots["shareable"][: self.occupied] = False
        for row in (row for row in self.rows if not row.adapter):
            generated = int(self.slots["generated"][row.slot])
            if not same and generated == 0 and self.slots["cached"][row.slot] > 0 and row.prompt_version is None:
                row.prompt_version = before
            if row.spans and row.spans[-1][0] == generated:
                row.spans[-1][1] = version
            elif row.spans and row.spans[-1][1] != version:
                row.spans.append([generated, version])

    def _swap(self, one: int, other: int) -> None:
        """Exchanges two rows whole: a broken one may leave values that are not finite, which a mask does not stop."""
        if one == other:
            return
        pair, reverse = [one, other], [other, one]
        for store in self._stores:
            store.swap_slots(one, other, int(self.slots["cached"][pair].max()))
        self.slots[pair] = self.slots[reverse]
        used = int((self.slots["prompt"][pair] + self.slots["generated"][pair]).max())
        self.tokens_SM[pair, :used] = self.tokens_SM[reverse, :used]
        self.stop_SW[pair] = self.stop_SW[reverse]
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self.rows[one].slot, self.rows[other].slot = one, other


def _spans(row: RequestRow, start: int, end: int) -> tuple[VersionSpan, ...]:
    ends = [first for first, _ in row.spans[1:]] + [end]
    return tuple(
        VersionSpan(
            start=max(first, start), end=min(last, end), version=version,
            prompt_version=row.prompt_version if first == start == 0 and row.prompt_version != version else None,
        )
        for (first, version), last in zip(row.spans, ends, strict=True)
        if max(first, start) < min(last, end)
    )  # fmt: skip
