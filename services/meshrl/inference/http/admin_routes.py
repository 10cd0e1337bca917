"""Routes that change an engine: pausing it, putting it to sleep, loading weights by hand, joining a group by hand.

A hub calls /follow_hub; the others are for an engine under a trainer of its own. A group joined by hand replaces the
hub's until the next one.
"""

from __future__ import annotations

import functools
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from meshrl.inference.agent.follower import HubFollower
from meshrl.inference.checkpoints import WeightLoader
from meshrl.inference.engine import Engine
from meshrl.inference.http.runs import parse
from meshrl.machine.addresses import address_of
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup


class WeightsBody(BaseModel):
    """A Hugging Face checkpoint folder, under either name, and its version."""

    model_config = ConfigDict(extra="ignore")

    weight_dir: str | None = None
    path: str | None = None
    version: int | None = Field(default=None, ge=0)


class AdapterBody(BaseModel):
    """A folder in PEFT's format, whose version requests for the model `lora_name` get in place of the one before."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str = Field(default="policy", pattern=r"^[^@]+$")
    lora_path: str
    version: int | None = Field(default=None, ge=0)


class BroadcasterBody(BaseModel):
    """Where the senders of a group meet, and this engine's place; see JoinGroup."""

    model_config = ConfigDict(extra="ignore")

    host: str
    port: int = Field(ge=1, le=65535)
    generation: int = Field(default=1, ge=1)
    num_senders: int = Field(default=1, ge=1)
    num_receivers: int = Field(ge=1)
    first_receiver: int = Field(default=0, ge=0)
    backend: str | None = None
    deadline_s: float = Field(default=60.0, gt=0.0)


class HubBody(BaseModel):
    """An empty `host` is the calling host, for a hub that listens everywhere. `token` is shown to the hub; empty takes
    the engine's own."""

    model_config = ConfigDict(extra="ignore")

    host: str = ""
    port: int = Field(ge=1, le=65535)
    url: str = ""
    token: str = Field(default="", repr=False, max_length=256, pattern=r"^[!-~]*$")


class AdminRoutes:
    """The server decides who may call them. Without a follower no hub can call."""

    def __init__(self, engine: Engine, loader: WeightLoader, follower: HubFollower | None = None) -> None:
        self._engine = engine
        self._loader = loader
        self._follower = follower

    def add_to(self, router: web.UrlDispatcher) -> None:
        for path, (method, handler) in _HANDLERS.items():
            router.add_route(method, path, functools.partial(handler, self))

    async def _pause(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "paused", "in_flight": await self._engine.pause()})

    async def _resume(self, _request: web.Request) -> web.StreamResponse:
        await self._engine.resume()
        return web.json_response({"status": "running", "in_flight": self._engine.in_flight})

    async def _sleep(self, _request: web.Request) -> web.StreamResponse:
        if not self._engine.can_sleep:
            raise MeshError(
                Reason.NOT_SUPPORTED, "this engine has no sleep mode; start vLLM on a GPU with enable_sleep_mode"
            )
        asleep = await self._engine.sleep()
        return web.json_response({"is_sleeping": asleep, "in_flight": self._engine.in_flight})

    async def _wake_up(self, _request: web.Request) -> web.StreamResponse:
        await self._engine.wake()
        return web.json_response({"is_sleeping": self._engine.sleeping})

    async def _is_sleeping(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": self._engine.sleeping})

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        body = parse(WeightsBody, await request.read())
        folder = body.weight_dir or body.path
        if not folder:
            raise MeshError(Reason.INVALID_REQUEST, "send weight_dir: the folder of a Hugging Face checkpoint")
        version = self._version(body.version)
        return self._loaded(version, await self._loader.load(Path(folder), version))

    async def _reload_weights(self, request: web.Request) -> web.StreamResponse:
        body = parse(WeightsBody, await request.read() or b"{}")
        version = body.version or 0
        return self._loaded(version, await self._loader.load(None, version))

    async def _load_lora_adapter(self, request: web.Request) -> web.StreamResponse:
        body = parse(AdapterBody, await request.read())
        version = await self._loader.load_adapter(Path(body.lora_path), body.lora_name, body.version)
        return self._loaded(version, 0.0, lora_name=body.lora_name)

    async def _init_broadcaster(self, request: web.Request) -> web.StreamResponse:
        body = parse(BroadcasterBody, await request.read())
        seat = self._engine.collective
        if seat is None:
            raise MeshError(Reason.NOT_SUPPORTED, "this engine cannot take part in a group; use another transport")
        if body.first_receiver + seat.ranks > body.num_receivers:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"this engine is {seat.ranks} receivers from number {body.first_receiver} on, which is beyond "
                f"num_receivers ({body.num_receivers})",
            )
        host = f"[{body.host}]" if ":" in body.host else body.host
        await self._engine.join_group(
            JoinGroup(
                generation=body.generation,
                store_address=f"{host}:{body.port}",
                backend=body.backend or seat.backend,
                num_senders=body.num_senders,
                num_receivers=body.num_receivers,
                first_receiver=body.first_receiver,
                deadline_s=body.deadline_s,
            )
        )
        return web.json_response({"status": "ok", "generation": body.generation, "ranks": seat.ranks})

    async def _follow_hub(self, request: web.Request) -> web.StreamResponse:
        body = parse(HubBody, await request.read())
        if self._follower is None:
            raise MeshError(Reason.NOT_SUPPORTED, "this engine was started without an agent for weight hubs")
        host = body.host or request.remote or ""
        hub = address_of(host, body.port)
        await self._follower.follow(hub, body.url, body.token)
        return web.json_response({"status": "following", "hub": hub})

    def _version(self, asked: int | None) -> int:
        current = self._engine.version
        return asked if asked is not None else 0 if current is None else current + 1

    def _loaded(self, version: int, pause_s: float, **more: str) -> web.StreamResponse:
        root = self._engine.root
        answer = {"status": "ok", "version": version, "root": root.hex() if root else "", "pause_s": pause_s, **more}
        return web.json_response(answer)


_HANDLERS = {
    "/pause": ("POST", AdminRoutes._pause),
    "/resume": ("POST", AdminRoutes._resume),
    "/sleep": ("POST", AdminRoutes._sleep),
    "/wake_up": ("POST", AdminRoutes._wake_up),
    "/is_sleeping": ("GET", AdminRoutes._is_sleeping),
    "/update_weights": ("POST", AdminRoutes._update_weights),
    "/reload_weights": ("POST", AdminRoutes._reload_weights),
    "/load_lora_adapter": ("POST", AdminRoutes._load_lora_adapter),
    "/init_broadcaster": ("POST", AdminRoutes._init_broadcaster),
    "/follow_hub": ("POST", AdminRoutes._follow_hub),
}
ADMIN_PATHS = frozenset(_HANDLERS)
