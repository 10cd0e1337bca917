"""The web server of `meshrl ui`: a page, its data as JSON, and an event stream of a run's progress.

It changes nothing. The page shows the policies' texts, so it listens on loopback; elsewhere every request needs a
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import mimetypes
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import zstandard
from aiohttp import web
from aiohttp.typedefs import Middleware

from meshrl.cli.run_folder import RunFolder
from meshrl.cli.status import read_status
from meshrl.cli.ui.pieces import TokenPieces
from meshrl.cli.ui.views import (
    OF_VERSIONS,
    WINDOW,
    KeptRollouts,
    LedgerFunnel,
    Traces,
    differences,
    tokens_of,
    waits_of,
    without_tokens,
)
from meshrl.client.idle_connections import IdleConnections
from meshrl.diagnosis.causes import diagnose
from meshrl.machine.ports import bound, port_of
from meshrl.wire.values import JsonObject

_T = TypeVar("_T")


STATIC = Path(__file__).parent / "static"
LOOK_S, REST_S = 0.5, 5.0
"""Between looks for growth of a run's files, and after growth, at which pages draw anew."""
STATUS_S = 3.0
"""All pages share an answer of the services for so long."""
MOST_POINTS = 2000
_DIGITS, _MOST = 18, 2**62
"""More digits count as _MOST: Python reads at most 4,300 digits, a file name has 255."""
TOKEN_COOKIE = "meshrl_ui"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ShownRun:
    """Files are read on a thread, one call at a time."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.history = folder.unread_history()  # read on a thread
        self.traces = Traces(folder)
        self.funnel = LedgerFunnel(folder)
        self.pieces = TokenPieces(folder)
        self.kept = KeptRollouts(folder)
        self._lock = asyncio.Lock()
        self._status: tuple[float, JsonObject] | None = None
        self._asking = asyncio.Lock()

    async def read(self, read: Callable[[], _T]) -> _T:
        """Runs on if the request is cancelled, so that no other begins.

        Raises HTTPServiceUnavailable for damaged or unreadable files.
        """
        return await asyncio.shield(self._read(read))

    async def _read(self, read: Callable[[], _T]) -> _T:
        async with self._lock:
            try:
                return await asyncio.to_thread(read)
            except (OSError, ValueError, sqlite3.Error, zstandard.ZstdError) as error:
                raise web.HTTPServiceUnavailable(
                    text=f"the files of {self.folder.path} cannot be read: {' '.join(str(error).split())}"
                ) from error

    def window(self, sample: JsonObject, number: int) -> JsonObject:
        """The kept tokens of a window, with known texts. Blocks."""
        found = tokens_of(sample, number)
        return {**found, "pieces": self.pieces.of(found["token_ids"])}

    def summary(self) -> JsonObject:
        """A line about the run. Blocks."""
        last, config = self.folder.last_step() or {}, self.folder.config("orchestrator")
        live, most = self.folder.is_running(), config.get("max_steps")
        return {
            "path": str(self.folder.path),
            "live": live,
            "ended_by": "" if live else self.folder.why_it_ended(),
            "step": last.get("step"),
            "max_steps": most if isinstance(most, int) else None,
            "reward": last.get("reward/all/mean"),
            "step_s": last.get("time/step"),
            "rollouts_per_s": last.get("perf/rollouts_per_s"),
            "errored": last.get("errored_rollouts/all"),
            "environments": [str(env["id"]) for env in config.get("train", {}).get("env", ())],
        }

    async def status(self) -> JsonObject:
        """At most STATUS_S old."""
        async with self._asking:
            if self._status is None or time.monotonic() - self._status[0] > STATUS_S:
                now = await read_status(self.folder)
                running = self.folder.is_running()
                end = None if running else self.folder.end()
                more = {"well": now.is_well, "running": running, "end": None if end is None else asdict(end)}
                self._status = (time.monotonic(), {**asdict(now), **more})
            return self._status[1]


class Page:
    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._runs = [ShownRun(folder) for folder in runs]
        self._ending = asyncio.Event()
        self._files = {path.name: path.read_bytes() for path in STATIC.iterdir()}

    def application(
        self, *, hosts: frozenset[str] | None, token: str | None, idle: IdleConnections | None = None
    ) -> web.Application:
        """`hosts` are the names by which it may be called, None any; requests must carry the `token`, if any."""
        first = [] if idle is None else [idle.middleware]
        app = web.Application(middlewares=[*first, _guard(hosts, token)])
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/api/runs", self._list),
                web.get("/api/differences", self._differences),
                web.get("/api/runs/{run}/now", self._now),
                web.get("/api/runs/{run}/doctor", self._doctor),
                web.get("/api/runs/{run}/metrics", self._metrics),
                web.get("/api/runs/{run}/rollouts", self._rollouts),
                web.get("/api/runs/{run}/rollouts/{step}/{rollout_id}", self._rollout),
                web.get("/api/runs/{run}/rollouts/{step}/{rollout_id}/tokens", self._tokens),
                web.get("/api/runs/{run}/timeline", self._timeline),
                web.get("/api/runs/{run}/versions", self._versions),
                web.get("/api/runs/{run}/ledger", self._ledger),
                web.get("/api/runs/{run}/events", self._events),
                web.get("/static/{name}", self._static),
            ]
        )
        app.on_shutdown.append(self._end)
        app.on_response_prepare.append(_add_headers)
        return app

    async def _end(self, _: web.Application) -> None:
        self._ending.set()  # event streams would go on for ever

    def _run(self, request: web.Request) -> ShownRun:
        number = _whole(request.match_info["run"])
        if number is None or number >= len(self._runs):
            raise web.HTTPNotFound(text=f"no run {request.match_info['run']}; there are {len(self._runs)}, from 0 on")
        return self._runs[number]

    async def _index(self, _: web.Request) -> web.Response:
        return self._file("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        if name not in self._files:
            raise web.HTTPNotFound(text=f"the page has no file {name!r}")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8")

    async def _list(self, _: web.Request) -> web.Response:
        return _json([await run.read(run.summary) for run in self._runs])

    async def _differences(self, request: web.Request) -> web.Response:
        """By which the configurations of `runs` differ, as numbers joined by commas."""
        numbers = [number for name in request.query.get("runs", "").split(",") if (number := _whole(name)) is not None]
        chosen = [self._runs[number] for number in numbers if number < len(self._runs)]
        return _json(differences([await run.read(run.folder.settings) for run in chosen]))

    async def _doctor(self, request: web.Request) -> web.Response:
        run = self._run(request)
        found = await run.read(lambda: diagnose(run.folder.observed(run.history)))
        return _json([asdict(one) for one in found])

    async def _now(self, request: web.Request) -> web.Response:
        return _json(await self._run(request).status())

    async def _metrics(self, request: web.Request) -> web.Response:
        """`names`, joined by commas, as at most `points` points each; without `names` a list of metrics. `along` is
        step, tokens or time."""
        run = self._run(request)
        names = [name for name in request.query.get("names", "").split(",") if name]
        along = request.query.get("along", "step")
        most = _number(request, "points", 600, least=1, most=MOST_POINTS)

        def read() -> JsonObject:
            run.history.read_on()
            if not names:
                return {"names": run.history.names, "last": run.history.last}
            return {"series": run.history.points(names, most, along), "last": run.history.last}

        return _json(await run.read(read))

    async def _rollouts(self, request: web.Request) -> web.Response:
        run = self._run(request)
        steps = await run.read(run.folder.sampled_steps)
        step = _number(request, "step", steps[-1] if steps else 0)
        found = await run.read(lambda: run.kept.listed(step, request.query.get("words", "")))
        return _json({"step": step, "steps": steps, "rollouts": found})

    async def _rollout(self, request: web.Request) -> web.Response:
        """With the first tokens of its first sample; `_tokens` has the others."""
        run, found = await self._kept(request)
        if samples := found.get("samples"):
            first = await run.read(lambda: run.window(samples[0], 0))
            found = {**found, "samples": [without_tokens(one) for one in samples], "window": WINDOW, "first": first}
        return _json(found)

    async def _tokens(self, request: web.Request) -> web.Response:
        """Of a `sample`, from `window` times WINDOW on: lists of one entry a token."""
        run, found = await self._kept(request)
        samples = found.get("samples", ())
        place, window = _number(request, "sample", 0), _number(request, "window", 0)
        if place >= len(samples):
            raise web.HTTPNotFound(text=f"no sample {place}; there are {len(samples)}")
        return _json(await run.read(lambda: run.window(samples[place], window)))

    async def _kept(self, request: web.Request) -> tuple[ShownRun, JsonObject]:
        run, step = self._run(request), _whole(request.match_info["step"])
        rollout_id = request.match_info["rollout_id"]
        found = None if step is None else await run.read(lambda: run.kept.whole(step, rollout_id))
        if found is None:
            raise web.HTTPNotFound(text=f"no rollout {rollout_id} is kept of step {request.match_info['step']}")
        return run, found

    async def _versions(self, request: web.Request) -> web.Response:
        run = self._run(request)
        await run.read(lambda: run.traces.read_on(OF_VERSIONS))
        return _json(await run.read(run.traces.versions))

    async def _timeline(self, request: web.Request) -> web.Response:
        run = self._run(request)
        await run.read(run.traces.read_on)
        await run.read(run.history.read_on)
        steps = run.traces.steps
        if not steps:
            raise web.HTTPNotFound(text="no step has ended that left a trace in traces/")
        trained = -1 if run.history.last is None else int(run.history.last["step"])  # a span may be of a step cut short
        step = _number(request, "step", trained if trained in steps else steps[-1])
        found = await run.read(lambda: run.traces.timeline(step))
        if found is None:
            raise web.HTTPNotFound(text=f"no trace of step {step}; the last one is of step {steps[-1]}")
        return _json({**found, "waits": waits_of(run.history.series.columns, step)})

    async def _ledger(self, request: web.Request) -> web.Response:
        run = self._run(request)
        return _json(await run.read(run.funnel.read))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """The size of metrics.jsonl whenever it has grown."""
        run = self._run(request)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        known = -1
        with contextlib.suppress(ConnectionResetError):  # the page is gone
            await answer.prepare(request)
            while not self._ending.is_set():
                size = await asyncio.to_thread(_size, run.folder.path / "metrics.jsonl")
                grown = size != known
                known = size
                # A page that is gone is found out by writing to it, so a comment is written where there is no news.
                await answer.write(f"data: {size}\n\n".encode() if grown else b": still here\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), REST_S if grown else LOOK_S)
        return answer


def _guard(hosts: frozenset[str] | None, token: str | None) -> Middleware:
    """Refuses other host names (DNS rebinding) and requests without the token."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if hosts is not None and request.host not in hosts:
            raise web.HTTPForbidden(text=f"this page is not called {request.host!r}; open the address it printed")
        given = request.query.get("token") or request.cookies.get(TOKEN_COOKIE, "")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise web.HTTPUnauthorized(text="open the address that `meshrl ui` printed: it ends in ?token=...")
        answer = await handler(request)
        if token is not None and "token" in request.query and not answer.prepared:
            answer.set_cookie(TOKEN_COOKIE, token, httponly=True, samesite="Strict")  # for what the page asks for
        return answer

    return guard


async def _add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(HEADERS)


def _number(request: web.Request, name: str, usual: int, *, least: int = 0, most: int = _MOST) -> int:
    text = request.query.get(name)
    if text is None:
        return usual
    number = _whole(text)
    if number is None:
        raise web.HTTPBadRequest(text=f"{name} must be a whole number, got {text!r}")
    return max(least, min(number, most))


def _whole(text: str) -> int | None:
    """At most _MOST; None for text that is no decimal number."""
    if not text.isdecimal():
        return None
    return int(text) if len(text) <= _DIGITS else _MOST


def _json(value: object) -> web.Response:
    return web.json_response(value, dumps=lambda found: json.dumps(found, default=str))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # no step has ended yet
        return 0


async def serve(
    runs: Sequence[RunFolder], *, host: str, port: int, token: str | None, ready: Callable[[int], None]
) -> None:
    """Until cancelled; `ready` gets the port once it listens. Raises OSError."""
    if not port:
        with bound(host) as probe:
            port = port_of(probe)
    names = ("127.0.0.1", "localhost", "[::1]")
    hosts = frozenset(f"{name}:{port}" for name in names) if token is None else None
    idle = IdleConnections()
    app = Page(runs).application(hosts=hosts, token=token, idle=idle)
    site_runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    try:
        await site_runner.setup()
        await web.TCPSite(site_runner, host, port).start()
        ready(port)
        async with idle.closed(site_runner):
            await asyncio.Event().wait()
    finally:
        await site_runner.cleanup()
