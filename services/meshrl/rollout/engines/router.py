"""Calls inference engines over HTTP: routes each model call, moves it when an engine is gone, and keeps the versions
known.

`engine_table` chooses the engine. A call moves to another one only before the first byte of an answer, so no turn gets
tokens of two engines.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp
from loguru import logger

from meshrl.core.rpc.engine_http import engine_session
from meshrl.core.waiting import Pulse
from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.calls import ACCEPT, EngineAnswer, Session
from meshrl.rollout.engines.capacity import NOTHING_SAID, EngineCapacity, capacity_in_metrics, capacity_of
from meshrl.rollout.engines.engine_rate import CallTiming
from meshrl.rollout.engines.engine_table import EngineTable, KnownEngine, Requirement
from meshrl.rollout.engines.keys import LOCKED, key_refusal, why_locked_out
from meshrl.rollout.engines.logprobs_mode import logprobs_mode_of
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import TRACEPARENT, current_traceparent

GENERATE_PATH = "/inference/v1/generate"
BUSY = frozenset({429, 503})
BUSY_PAUSE_S = 0.2
SESSION_HEADER = "X-Session-ID"
RUN_HEADER = "X-Policy-Run"
VERSION_HEADER = "X-Policy-Version"
SYNCS_HEADER = "X-Policy-Syncs"
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, unanswered probes

Discovery = Callable[[], Awaitable[list[tuple[str, str]]]]


class EngineRefusedError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _UnreachableError(Exception):
    """No byte of an answer came."""


class _LockedOutError(Exception):
    """The engine refused the key."""


class _BusyError(Exception):
    """The engine takes no more calls for `retry_after_s`; 0 is unknown."""

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


def version_of(payload: object) -> int | None:
    """Reads GET /version: None while the engine holds no weights, 0 for an engine without versions. vLLM has its
    package's version there as a string, and serves the weights it was started with."""
    version = payload.get("version", "") if isinstance(payload, dict) else ""
    return version if isinstance(version, int | None) and not isinstance(version, bool) else 0


def runs_of(payload: object) -> dict[str, int]:
    """Versions of the runs' adapters in the same answer; empty for an engine with one policy."""
    runs = payload.get("runs") if isinstance(payload, dict) else None
    return {run: version for run, version in runs.items() if isinstance(version, int)} if isinstance(runs, dict) else {}


class EngineRouter:
    """Owns the connections to the engines. An async context manager."""

    def __init__(
        self,
        engines: EngineTable,
        config: ClientConfig,
        *,
        api_key: str | None = None,
        discovery: Discovery | None = None,
    ) -> None:
        self.engines = engines
        self.on_look: Callable[[], None] = lambda: None
        self._config = config
        self._api_key = api_key
        self._discovery = discovery
        self._hub_away = False
        self._changed = Pulse()
        self._probing: asyncio.Task[None] | None = None
        self._round: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineRouter:
        # The number of rollouts bounds the connections.
        self._http = engine_session(self._api_key, limit=0, socket_factory=_watched_socket)
        await self.refresh()
        self._probing = asyncio.create_task(self._refresh_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in (self._probing, self._round):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def refresh(self) -> None:
        await asyncio.shield(self._begin_round())

    def _begin_round(self) -> asyncio.Task[None]:
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_all())
        return self._round

    async def _look_anew(self, need: Requirement) -> None:
        """Looks at every engine after now, unless a look under way finds one that can serve `need`: a version may have
        come after the last one."""
        if self._round is not None and not self._round.done():
            await asyncio.shield(self._round)
        if not self.engines.can_meet(need):
            await self.refresh()

    async def require(self, need: Requirement) -> None:
        """Raises MeshError when no engine can serve `need` now: VERSION_NOT_AVAILABLE, LOGPROBS_BIASED, or
        INVALID_REQUEST for an unknown pool. While no engine is reachable, a request without a version bound is let
        through, and its calls wait for one, unless every engine refuses this program's key."""
        if need.pool and need.pool not in self.engines.known_pools:
            pools = ", ".join(sorted(repr(pool) for pool in self.engines.known_pools))
            raise MeshError(Reason.INVALID_REQUEST, f"no engine pool {need.pool!r} here; the pools are {pools}")
        if self.engines.can_meet(need):
            return
        if need.names_a_version or need.reshaped_by:
            await self._look_anew(need)
        self._refuse_biased(need)
        if (need.names_a_version or self.engines.locked_out(need)) and not self.engines.can_meet(need):
            raise self._not_available(need)

    def _refuse_biased(self, need: Requirement) -> None:
        if engines := self.engines.biased(need):
            modes = ", ".join(f"{engine.url} ({engine.logprobs_mode or 'unknown'})" for engine in engines)
            raise MeshError(
                Reason.LOGPROBS_BIASED,
                f"sampling with {', '.join(need.reshaped_by)} changes the distribution, and no engine reports logprobs"
                f" of what it sampled from: {modes}; importance ratios would be biased. Leave that setting out, start"
                " the engines with --logprobs-mode processed_logprobs, or set rollout.client.logprobs_mode if they are",
            )

    async def generate(
        self, session: Session, session_id: str, body: bytes, need: Requirement, *, prompt_tokens: int
    ) -> EngineAnswer:
        """Has one engine complete `body`, a JSON request of the generate endpoint. Raises MeshError
        VERSION_NOT_AVAILABLE or ENGINE_FAILED when no engine took the call within `failover_s`, or one broke off an
        answer, LOGPROBS_BIASED when none reports logprobs that fit, and EngineRefusedError when an engine rejected the
        request itself."""
        started = time.monotonic()
        last_chance = started + self._config.call_deadline_s
        give_up_at = started + self._config.failover_s
        skip: set[str] = set()
        not_before: dict[str, float] = {}  # when a busy engine may be asked again, as it said
        why, looked = "no engine is reachable", False
        while True:
            if need.names_a_version and not (looked or self.engines.can_meet(need)):
                session.doing, looked = f"looking for an engine with {need.describe()}", True
                await self._look_anew(need)
            engine = self.engines.select(
                need, prefer=session.engine, skip=skip, group_id=session.group_id, prompt_tokens=prompt_tokens
            )
            if engine is None:
                self._refuse_biased(need)
                if time.monotonic() >= give_up_at or self.engines.is_past(need):
                    if any(one.healthy for one in self.engines.candidates(need)) and not self.engines.can_meet(need):
                        raise self._not_available(need)
                    failover_s = self._config.failover_s
                    raise MeshError(Reason.ENGINE_FAILED, f"no engine took the call within {failover_s:g} s: {why}")
                session.doing = f"waiting for an engine to take its model call ({why})"
                await self._wait_for_change(need, give_up_at)
                skip = {url for url, time_s in not_before.items() if time_s > time.monotonic()}
                continue
            session.doing = f"in a model call at {engine.url}"
            try:
                answer = await self._call(engine, session_id, body, need)
            except _UnreachableError as error:
                why = str(error)
                logger.warning("engine {} is gone ({}); its calls move to others", engine.url, error)
                self.engines.lose(engine.url)
                give_up_at = min(time.monotonic() + self._config.failover_s, last_chance)
                continue
            except _LockedOutError as error:
                why = str(error)
                self._lock_out(engine, why)
                continue
            except _BusyError as error:
                why = str(error)
                skip.add(engine.url)
                not_before[engine.url] = time.monotonic() + error.retry_after_s
                continue
            session.engine = engine.url
            return answer

    def _not_available(self, need: Requirement) -> MeshError:
        newest = self.engines.newest(need)
        troubles = self.engines.troubles(need)
        held = "no engine is reachable" if newest is None else f"the newest version served is {newest}"
        held += f" ({troubles})" if troubles else ""
        return MeshError(
            Reason.VERSION_NOT_AVAILABLE,
            f"{need.describe()} is needed, but {held}",
            retry_after_s=self._config.probe_interval_s,
        )

    async def _call(self, engine: KnownEngine, session_id: str, body: bytes, need: Requirement) -> EngineAnswer:
        """Raises _UnreachableError, _LockedOutError or _BusyError, after which another engine may be asked, and
        EngineRefusedError or MeshError ENGINE_FAILED, after which none may."""
        assert self._http is not None  # entered
        headers = {"Content-Type": "application/json", "Accept": ACCEPT, SESSION_HEADER: session_id}
        if need.run_id:
            headers[RUN_HEADER] = need.run_id
        if traceparent := current_traceparent():
            headers[TRACEPARENT] = traceparent
        timeout = aiohttp.ClientTimeout(
            total=self._config.call_deadline_s, sock_connect=self._config.connect_deadline_s
        )
        before = engine.version_for(need)
        running = engine.rate.began(time.monotonic())
        timing: CallTiming | None = None
        answered = False
        patience = asyncio.timeout(None)
        engine.patience.add(patience)
        try:
            async with (
                patience,
                self._http.post(engine.url + GENERATE_PATH, data=body, headers=headers, timeout=timeout) as reply,
            ):
                patience.reschedule(None)  # an answer is coming: nobody else may be asked
                engine.patience.discard(patience)
                answered = True
                raw = await reply.read()
                if reply.status in BUSY:
                    wait = reply.headers.get("Retry-After", "")
                    detail = f"{engine.url} answered {reply.status}: {_short(raw)}"
                    raise _BusyError(detail, float(wait) if wait.isdecimal() else 0.0)
                if reply.status in LOCKED:
                    raise _LockedOutError(
                        key_refusal(engine.url, reply.status, self._config, has_key=bool(self._api_key))
                    )
                if reply.status != 200:
                    raise EngineRefusedError(reply.status, f"{engine.url} answered {reply.status}: {_short(raw)}")
                header = reply.headers.get(VERSION_HEADER, "")
                after = int(header) if header.isdigit() else engine.version_for(need)
                syncs = reply.headers.get(SYNCS_HEADER, "")
                timing = engine.rate.ended(running, time.monotonic())
                return EngineAnswer(raw, before, after, reply.content_type, syncs, timing)
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectionError) and not answered:
                raise _UnreachableError(f"{type(error).__name__}: {error}") from error
            raise MeshError(Reason.ENGINE_FAILED, f"{engine.url} broke off its answer: {error}") from error
        except TimeoutError as error:
            if patience.expired():
                raise _UnreachableError(f"no sign of life for {self._config.failover_s:g} s") from error
            raise MeshError(
                Reason.ENGINE_FAILED, f"{engine.url} took longer than {self._config.call_deadline_s:g} s"
            ) from error
        finally:
            engine.patience.discard(patience)
            if timing is None:
                engine.rate.ended(running, time.monotonic())

    async def _wait_for_change(self, need: Requirement, until: float) -> None:
        left_s = min(BUSY_PAUSE_S, until - time.monotonic())
        try:
            async with asyncio.timeout(max(left_s, 0.01)):
                await self._changed.next()
        except TimeoutError:  # a busy engine tells nobody when it is free again: look again after a moment
            if all(engine.version_for(need) is None for engine in self.engines.candidates(need)):
                self._begin_round()  # nor does one that is back: everything stands still until it is seen

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.probe_interval_s)
            await self.refresh()

    async def _probe_all(self) -> None:
        known = self.engines.remembered
        await asyncio.gather(self._discover(), *(self._probe(engine) for engine in known))
        await asyncio.gather(*(self._probe(engine) for engine in self.engines.remembered if engine not in known))
        self._changed.beat()
        self.on_look()

    def _note_answer(self, engine: KnownEngine, answers: bool) -> None:
        now = time.monotonic()
        if answers:
            engine.silent_since_s = None
            return
        if engine.silent_since_s is None:
            engine.silent_since_s = now
        if now - engine.silent_since_s >= self._config.failover_s:
            for patience in engine.patience:
                patience.reschedule(asyncio.get_running_loop().time())
            engine.patience.clear()

    async def _discover(self) -> None:
        if self._discovery is None:
            return
        try:
            self.engines.discover(await self._discovery())
        except MeshError as error:  # the hub may restart; the engines known so far go on
            if not self._hub_away:
                logger.warning("cannot list engines at the weight hub, so those known go on: {}", error)
            self._hub_away = True
        else:
            self._hub_away = False

    async def _probe(self, engine: KnownEngine) -> None:
        assert self._http is not None  # entered
        timeout = aiohttp.ClientTimeout(total=self._config.probe_deadline_s)
        try:
            async with self._http.get(engine.url + "/health", timeout=timeout) as health:
                self._note_answer(engine, answers=True)
                if health.status >= 500:  # draining, or unfit to serve
                    self.engines.lose(
                        engine.url, f"{engine.url} answers {health.status}: {_short(await health.read())}"
                    )
                    return
            if not engine.healthy and (
                refused := await why_locked_out(
                    self._http, f"{engine.url}/v1", self._config, has_key=bool(self._api_key)
                )
            ):
                self._lock_out(engine, refused)
                return
            async with self._http.get(engine.url + "/version", timeout=timeout) as reply:
                if reply.status == 200:
                    payload = await reply.json(content_type=None)
                    mode = logprobs_mode_of(payload) or self._config.logprobs_mode
                    capacity = capacity_of(payload)
                    if capacity == NOTHING_SAID:
                        capacity = await self._capacity_in_metrics(engine)
                    self.engines.observe(engine.url, version_of(payload), mode, capacity, runs_of(payload))
                elif reply.status == 404 and health.status == 200:  # a server without versions
                    capacity = await self._capacity_in_metrics(engine)
                    self.engines.observe(engine.url, 0, self._config.logprobs_mode, capacity)
                else:
                    self.engines.lose(engine.url)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = f"{engine.url} does not answer: {str(error) or type(error).__name__}"  # a timeout has no text
            if engine.healthy:
                logger.warning("engine {}", why)
            self._note_answer(engine, answers=False)
            self.engines.lose(engine.url, why)

    def _lock_out(self, engine: KnownEngine, why: str) -> None:
        if engine.trouble != why:
            logger.error("{}", why)
        self.engines.lock_out(engine.url, why)

    async def _capacity_in_metrics(self, engine: KnownEngine) -> EngineCapacity:
        assert self._http is not None  # entered
        if engine.healthy:
            return engine.capacity
        timeout = aiohttp.ClientTimeout(total=self._config.probe_deadline_s)
        try:
            async with self._http.get(engine.url + "/metrics", timeout=timeout) as reply:
                return capacity_in_metrics(await reply.text()) if reply.status == 200 else NOTHING_SAID
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # it serves all the same
            logger.debug("engine {} has no metrics to read: {}", engine.url, error or type(error).__name__)
            return NOTHING_SAID


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Its connection breaks within half a minute of the host's end, so that its calls move on."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # the names differ between systems
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def _short(raw: bytes) -> str:
    return raw[:500].decode(errors="replace")
