"""How many rollouts may run at once, as configured or as the engines report. No I/O.

An engine runs at most `slots` sequences, and only as many as its KV cache has room for. Ours report both in GET
/version, other vLLM servers their KV cache in GET /metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.core.metrics.statistics import MovingMean
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.types import Rollout

if TYPE_CHECKING:
    from meshrl.rollout.engines.engine_table import KnownEngine

_VLLM_CACHE = "vllm:cache_config_info"
_LABEL = re.compile(r'(\w+)="([^"]*)"')

UNKNOWN_SLOTS = 256
"""Of an engine that reports none."""

SPARE = 1 / 8
"""Share of rollouts beyond the capacity, so that an engine takes the next one from its own queue."""

LEAST_TIME_IN_CALLS = 1 / 4
"""At most four times the engines' capacity runs."""

LEAST_ROOM, AFTER_PREEMPTION, GROWTH = 1 / 4, 0.9, 1.05
"""Least share of the computed sequences; factors after a look that found preemptions, and after one that found a full
engine without a queue."""

REMEMBERED = 64
"""Finished rollouts, in the averages."""


@dataclass(frozen=True, kw_only=True)
class EngineCapacity:
    """None is unreported. `kv_tokens` fit into its KV cache; `waiting` of its requests have no room, `preempted` lost
    it so far."""

    slots: int | None = None
    kv_tokens: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    preempted: int | None = None

    def sequences(self, tokens: float | None) -> int:
        """At least one; each has `tokens` in the KV cache (None: not known)."""
        slots = UNKNOWN_SLOTS if self.slots is None else self.slots
        if self.kv_tokens is None or not tokens:
            return max(1, slots)
        return max(1, min(slots, int(self.kv_tokens / tokens)))


NOTHING_SAID = EngineCapacity()


def capacity_of(payload: object) -> EngineCapacity:
    """Reads GET /version; a field that is no positive number counts as missing."""
    said = payload if isinstance(payload, dict) else {}
    least = {"slots": 1, "kv_tokens": 1, "in_flight": 0, "waiting": 0, "preempted": 0}
    values = {name: (said.get(name), fewest) for name, fewest in least.items()}
    return EngineCapacity(**{name: v for name, (v, fewest) in values.items() if type(v) is int and v >= fewest})


def capacity_in_metrics(text: str) -> EngineCapacity:
    """Reads GET /metrics of a vLLM server, which has the KV cache of all parts and no slots."""
    tokens = 0
    for line in text.splitlines():
        if not line.startswith(_VLLM_CACHE + "{"):
            continue
        labels = dict(_LABEL.findall(line))
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        tokens += int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0
    return EngineCapacity(kv_tokens=tokens or None)


@dataclass(frozen=True)
class EpisodeSizes:
    """One rollout's sampled tokens, KV cache of a call, and seconds in all and in model calls."""

    sampled_tokens: int
    held_tokens: float
    total_s: float
    calls_s: float

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> EpisodeSizes:
        """One `Rollout` an agent. A call's cache grows with each sampled token: over its life it is the prompt and half
        of the completion."""
        samples = [(len(one.token_ids), int(one.loss_mask.sum())) for rollout in rollouts for one in rollout.samples]
        return cls._of(samples, [rollout.timings_s for rollout in rollouts])

    @classmethod
    def of_messages(cls, messages: Sequence[bytes]) -> EpisodeSizes:
        rollouts = [pb.RunRolloutsResponse.FromString(message).rollout for message in messages]
        samples = [
            (len(one.loss_mask.data), one.loss_mask.data.count(1)) for rollout in rollouts for one in rollout.samples
        ]
        return cls._of(samples, [rollout.timings_s for rollout in rollouts])

    @classmethod
    def _of(cls, samples: Sequence[tuple[int, int]], timings_s: Sequence[Mapping[str, float]]) -> EpisodeSizes:
        return cls(
            sampled_tokens=sum(sampled for _, sampled in samples),
            held_tokens=max((length - sampled / 2 for length, sampled in samples), default=0.0),
            total_s=max((timings.get("total", 0.0) for timings in timings_s), default=0.0),
            calls_s=sum(timings.get("generation", 0.0) for timings in timings_s),
        )


class KvRoom:
    """An engine's observed room, beside what its tokens of KV cache would hold.

    Prompts that a group shares take less than is counted, and rollouts that grow together take more at once.
    """

    def __init__(self) -> None:
        self._factor = 1.0
        self._preempted = 0

    def sequences(self, capacity: EngineCapacity, tokens: float | None) -> int:
        """Called at each look. Fewer than computed after preemptions, more while the engine is full without a queue."""
        computed, most = capacity.sequences(tokens), capacity.sequences(None)
        held = max(1, min(most, int(computed * self._factor)))
        preempted = capacity.preempted or 0
        if preempted > self._preempted:
            self._factor = max(LEAST_ROOM, AFTER_PREEMPTION * held / computed)
        elif held < most and capacity.waiting == 0 and (capacity.in_flight or 0) >= held:
            self._factor = GROWTH * max(self._factor, (held + 1) / computed / GROWTH)
        self._preempted = preempted
        return max(1, min(most, int(computed * self._factor)))


class RolloutLimit:
    """The limit now, and why. `fixed` None follows the engines."""

    def __init__(self, fixed: int | None) -> None:
        self.rollouts = UNKNOWN_SLOTS if fixed is None else fixed
        self.follows_engines = fixed is None
        self.reason = "no engine has answered yet" if fixed is None else "as configured"
        self._held_tokens = MovingMean(REMEMBERED)  # of a rollout's KV cache
        self._time_in_calls = MovingMean(REMEMBERED)  # share of a rollout's time

    def take(self, sizes: EpisodeSizes) -> None:
        self._held_tokens.add(sizes.held_tokens)
        if sizes.total_s > 0.0:
            self._time_in_calls.add(min(1.0, sizes.calls_s / sizes.total_s))

    @property
    def held_tokens(self) -> float | None:
        """Of a rollout's KV cache, on average."""
        return self._held_tokens.value

    def follow(self, engines: Collection[KnownEngine]) -> bool:
        """Counts the engines that are up; without any the limit stays. Returns whether it has changed."""
        if not self.follows_engines or not engines:
            return False
        before = self.rollouts
        held = [(engine, engine.room.sequences(engine.capacity, self.held_tokens)) for engine in engines]
        most = sum(number for _, number in held)
        said = sum(number for engine, number in held if engine.capacity != NOTHING_SAID)
        share = self._time_in_calls.value
        time_in_calls = 1.0 if share is None else max(LEAST_TIME_IN_CALLS, share)
        self.rollouts = math.ceil((most + SPARE * said) / time_in_calls)
        each = ", ".join(f"{engine.url} {_describe_hold(engine.capacity, number)}" for engine, number in held)
        self.reason = (
            f"auto: engines hold {most} ({each}), and {math.ceil(SPARE * said)} more wait at them;"
            f" {time_in_calls:.0%} of a rollout's time is in model calls"
        )
        return self.rollouts != before


def _describe_hold(capacity: EngineCapacity, number: int) -> str:
    if capacity == NOTHING_SAID:
        return f"{number}, as it does not say"
    slots = UNKNOWN_SLOTS if capacity.slots is None else capacity.slots
    return f"{number}, its slots" if number == slots else f"{number}, by {capacity.kv_tokens} tokens of KV cache"
