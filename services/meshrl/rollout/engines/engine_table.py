"""Chooses the engine of each model call by health, version, load and speed.

Engines get calls in proportion to their observed tokens/s. The first call of a rollout goes to the engine that has its
group's prompt, while that saves more than the longer queue there costs.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from meshrl.core.metrics.statistics import MovingMean
from meshrl.rollout.engines.capacity import NOTHING_SAID, EngineCapacity, KvRoom
from meshrl.rollout.engines.engine_rate import CallTiming, EngineRate, mean_rate
from meshrl.rollout.engines.logprobs_mode import PROCESSED
from meshrl.wire.types import EngineEndpoint, RolloutRequest, ServedVersion

PREFILL = 1 / 8
"""Cost of a prompt's token, in sampled tokens."""

REMEMBERED_GROUPS = 4096
"""The latest, whose prompts an engine is taken to have."""

REMEMBERED_CALLS = 64
"""In the mean of sampled tokens."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Which policy may sample. An empty run is the engines' only one. `reshaped_by` names settings that change the
    distribution; with any, logprobs must be of the sampled distribution."""

    run_id: str = ""
    pool: str = ""
    min_version: int | None = None
    exact_version: int | None = None
    reshaped_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: RolloutRequest) -> Requirement:
        return cls(
            run_id=request.run_id,
            pool=request.engine_pool,
            min_version=request.min_version,
            exact_version=request.exact_version,
        )

    @property
    def names_a_version(self) -> bool:
        return self.min_version is not None or self.exact_version is not None

    def met_by(self, version: int | None) -> bool:
        """An unknown version meets no bound."""
        if self.exact_version is not None:
            return version == self.exact_version
        if self.min_version is not None:
            return version is not None and version >= self.min_version
        return True

    def describe(self) -> str:
        if self.exact_version is not None:
            return f"version {self.exact_version}"
        return f"version {self.min_version} or newer" if self.min_version is not None else "any version"


@dataclass
class KnownEngine:
    """`version` and `logprobs_mode` are None while unknown. `listed` is False once the hub no longer names it: it gets
    no new calls, and is forgotten when its calls are over."""

    url: str
    pool: str = ""
    healthy: bool = False
    trouble: str = ""
    refuses_key: bool = False
    version: int | None = None
    runs: Mapping[str, int] = field(default_factory=dict)
    """Version of each run's adapter; empty for an engine with one policy."""
    logprobs_mode: str | None = None
    capacity: EngineCapacity = NOTHING_SAID
    room: KvRoom = field(default_factory=KvRoom)
    listed: bool = True
    chosen: int = 0  # number of the call that went here last
    rate: EngineRate = field(default_factory=EngineRate)
    prompts: OrderedDict[str, None] = field(default_factory=OrderedDict)
    silent_since_s: float | None = None
    """When it was first found silent, since its last answer."""
    patience: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def in_flight(self) -> int:
        return self.rate.running

    def fits(self, need: Requirement) -> bool:
        reports_right = not need.reshaped_by or self.logprobs_mode == PROCESSED
        has_run = not need.run_id or not self.runs or need.run_id in self.runs
        return self.listed and self.healthy and has_run and need.met_by(self.version_for(need)) and reports_right

    def version_for(self, need: Requirement) -> int | None:
        """None if it is unknown, or the run is not there."""
        return self.runs.get(need.run_id) if need.run_id and self.runs else self.version


class EngineTable:
    def __init__(self, urls: Iterable[str], pool: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines = {url: KnownEngine(url=url, pool=pool) for url in urls}
        self._fixed = frozenset(self._engines)
        self.known_pools = {engine.pool for engine in self._engines.values()}
        """Also earlier ones: a pool whose engines are all away may get others."""
        self._calls = 0
        self._sampled_tokens = MovingMean(REMEMBERED_CALLS)  # of a call

    @property
    def listed(self) -> tuple[KnownEngine, ...]:
        return tuple(engine for engine in self._engines.values() if engine.listed)

    @property
    def remembered(self) -> tuple[KnownEngine, ...]:
        return tuple(self._engines.values())

    def discover(self, found: Iterable[tuple[str, str]]) -> None:
        """The hub's routable engines as (url, pool); others go unless configured."""
        named = dict(found)
        for url, pool in named.items():
            self._engines.setdefault(url, KnownEngine(url=url, pool=pool)).listed = True
        self.known_pools |= set(named.values())
        for url in [url for url in self._engines if url not in named and url not in self._fixed]:
            engine = self._engines[url]
            engine.listed, engine.healthy, engine.version, engine.runs = False, False, None, {}
            if not engine.in_flight:
                del self._engines[url]

    def observe(
        self,
        url: str,
        version: int | None,
        logprobs_mode: str | None = None,
        capacity: EngineCapacity = NOTHING_SAID,
        runs: Mapping[str, int] | None = None,
    ) -> None:
        """An engine answered: it serves `version`, or one for each of `runs`."""
        if (engine := self._engines.get(url)) is not None:
            engine.healthy, engine.version, engine.logprobs_mode = True, version, logprobs_mode
            engine.trouble, engine.refuses_key = "", False
            engine.capacity, engine.runs = capacity, runs or {}

    def sampled(self, url: str, timing: CallTiming, tokens: int) -> None:
        self._sampled_tokens.add(tokens)
        if (engine := self._engines.get(url)) is not None:
            engine.rate.sampled(timing, tokens, self._clock())

    def lose(self, url: str, why: str = "") -> None:
        """An engine gets no calls until it answers. Its version is forgotten, since it may restart with an older
        one."""
        if (engine := self._engines.get(url)) is not None:
            engine.healthy, engine.version, engine.runs = False, None, {}
            engine.trouble, engine.refuses_key = why, False

    def lock_out(self, url: str, why: str) -> None:
        """An engine gets no calls until it takes this program's key."""
        self.lose(url, why)
        if (engine := self._engines.get(url)) is not None:
            engine.refuses_key = True

    def locked_out(self, need: Requirement) -> str:
        """Why no engine will take a call, if each refuses this program's key; else empty."""
        engines = self.candidates(need)
        return engines[0].trouble if engines and all(engine.refuses_key for engine in engines) else ""

    def troubles(self, need: Requirement) -> str:
        return "; ".join(engine.trouble for engine in self.candidates(need) if engine.trouble)

    def candidates(self, need: Requirement) -> list[KnownEngine]:
        return [engine for engine in self.listed if not need.pool or engine.pool == need.pool]

    def can_meet(self, need: Requirement) -> bool:
        return any(engine.fits(need) for engine in self.candidates(need))

    def biased(self, need: Requirement) -> tuple[KnownEngine, ...]:
        """The engines that are up, if `need` wants right logprobs and none of them reports such; waiting will not help.
        An engine without a version counts, as its logprobs mode does not change with its weights."""
        up = tuple(engine for engine in self.candidates(need) if engine.healthy)
        return up if need.reshaped_by and all(engine.logprobs_mode != PROCESSED for engine in up) else ()

    def is_past(self, need: Requirement) -> bool:
        """Every engine that is up is newer than the exact version: waiting will not help."""
        exact = need.exact_version
        up = [engine.version_for(need) for engine in self.candidates(need) if engine.healthy]
        return exact is not None and bool(up) and all(version is not None and version > exact for version in up)

    def select(
        self,
        need: Requirement,
        *,
        prefer: str | None = None,
        skip: Collection[str] = (),
        group_id: str = "",
        prompt_tokens: int = 0,
    ) -> KnownEngine | None:
        """The session's own engine (`prefer`) while it fits, else the one where the call takes the least time: sampling
        among the calls there, itself included, and the prompt unless its group's is there. Among equals the one whose
        turn is longest ago."""
        fitting = [engine for engine in self.candidates(need) if engine.url not in skip and engine.fits(need)]
        now_s, mean = self._clock(), mean_rate(engine.rate for engine in fitting)
        loads = {engine.url: (engine.in_flight + 1) / engine.rate.estimate(mean, now_s) for engine in fitting}
        least = min(loads.values(), default=1.0)
        mean_tokens = self._sampled_tokens.value
        sampling, prefill = (mean_tokens, PREFILL * prompt_tokens) if mean_tokens else (1.0, 0.0)

        def cost(engine: KnownEngine) -> tuple[float, int]:
            prompt = 0.0 if group_id in engine.prompts else prefill
            return sampling * loads[engine.url] / least + prompt, engine.chosen

        own = next((engine for engine in fitting if engine.url == prefer), None)
        engine = own or min(fitting, key=cost, default=None)
        if engine is not None:
            self._calls += 1
            engine.chosen = self._calls
            if group_id:
                engine.prompts[group_id] = None
                engine.prompts.move_to_end(group_id)
                if len(engine.prompts) > REMEMBERED_GROUPS:
                    engine.prompts.popitem(last=False)
        return engine

    def newest(self, need: Requirement) -> int | None:
        versions = (engine.version_for(need) for engine in self.candidates(need))
        return max((version for version in versions if version is not None), default=None)

    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        return tuple(
            EngineEndpoint(
                url=engine.url,
                healthy=engine.healthy,
                version=engine.version,
                in_flight=engine.in_flight,
                logprobs_mode=engine.logprobs_mode or "",
                slots=engine.capacity.slots,
                kv_tokens=engine.capacity.kv_tokens,
                served=tuple(ServedVersion(run_id=run, version=v, newest=True) for run, v in engine.runs.items()),
            )
            for engine in self.listed
        )
