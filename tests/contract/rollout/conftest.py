"""A scripted engine behind real HTTP, a hub that lists engines, a small tokenizer, and a rollout server."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider

from character_tokenizer import ALPHABET, END, save_character_tokenizer
from http_servers import stop_serving
from local_ports import free_port
from meshrl.client import RolloutClient
from meshrl.core.rpc.serve import GrpcServer
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.main import build
from meshrl.rollout.runner import RolloutRunner
from meshrl.rollout.service import SERVICE, RolloutServicer, add_to_server
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc as pb_grpc
from meshrl.wire.errors import MeshError
from meshrl.wire.types import RolloutRequest

sys.path.append(str(Path(__file__).parent / "tasksets"))  # verifiers loads tasksets as top-level modules
os.environ["MESH_WORKERS_KEY"] = "the-engines-key"  # before any fork server starts: workers have its variables

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(text: str) -> list[int]:
    return [3 + ALPHABET.index(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(ALPHABET[token - 3] if token > 2 else "|" for token in ids)


@dataclass
class ScriptedEngine:
    """Answers /inference/v1/generate as told. `reply` gets the request and returns the text or tokens to sample."""

    version: int | None = 0
    logprobs_mode: str | None = "processed_logprobs"
    reply: Callable[[dict[str, Any]], str | list[int]] = lambda request: "cat"
    delay_s: float = 0.0
    health: int = 200
    key: str = ""  # that calls must carry
    capacity: dict[str, int] = field(default_factory=dict)  # what it says of it in /version
    silent_s: float = 0.0  # before it answers whether it is well
    spans: Callable[[int], list[list[int]]] | None = None
    on_call: Callable[[web.Request, dict[str, Any]], Any] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    runner: web.AppRunner | None = None

    async def start(self) -> ScriptedEngine:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/version", self.get_version)
        app.router.add_get("/health", self.get_health)
        app.router.add_get("/v1/models", self.get_models)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    def hold(self) -> asyncio.Event:
        """Has all calls wait for the event."""
        gate = asyncio.Event()

        async def held(request: web.Request, body: object) -> None:
            await gate.wait()

        self.on_call = held
        return gate

    async def stop(self) -> None:
        if self.runner is not None:
            await stop_serving(self.runner)
            self.runner = None

    async def get_version(self, request: web.Request) -> web.Response:
        told = {} if self.logprobs_mode is None else {"logprobs_mode": self.logprobs_mode}
        return web.json_response(
            {"version": self.version, "root": "", "paused": False, "in_flight": 0, **told, **self.capacity}
        )

    async def get_health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.silent_s)
        return web.Response(status=self.health)

    def locks_out(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def get_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=401 if self.locks_out(request) else 200)

    async def generate(self, request: web.Request) -> web.Response:
        if self.locks_out(request):
            return web.json_response({"error": "no key"}, status=401)
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.put_nowait(None)
        if self.on_call is not None:
            special = self.on_call(request, body)
            if inspect.isawaitable(special):
                special = await special
            if special is not None:
                return special
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        reply = self.reply(body)
        ids = [*(encode(reply) if isinstance(reply, str) else reply), END][: body["sampling_params"]["max_tokens"]]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop" if ids[-1] == END else "length",
            "logprobs": {
                "content": [{"token": f"token_id:{token}", "logprob": -0.5 - 0.01 * i} for i, token in enumerate(ids)]
            },
        }
        if self.spans is not None:
            choice["version_spans"] = self.spans(len(ids))
        return web.json_response({"request_id": "r", "choices": [choice]})


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_character_tokenizer(folder, CHAT_TEMPLATE, ["<tool_call>", "</tool_call>"])
    return folder


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    scripted = await ScriptedEngine().start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def second() -> AsyncIterator[ScriptedEngine]:
    """Another engine."""
    scripted = await ScriptedEngine().start()
    yield scripted
    await scripted.stop()


@dataclass
class Hub(pb_grpc.WeightSyncServicer):
    """Answers ListEngines on a real port; `engines` are (url, pool, routable)."""

    engines: list[tuple[str, str, bool]] = field(default_factory=list)
    asked: int = 0
    port: int = field(default_factory=free_port)
    server: grpc.aio.Server | None = None

    async def ListEngines(self, request, context):  # noqa: N802  # the name of the RPC
        self.asked += 1
        return pb.ListEnginesResponse(
            engines=[
                pb.EngineInfo(engine_id=url, url=url, engine_pool=pool, routable=routable)
                for url, pool, routable in self.engines
            ]
        )

    async def start(self) -> None:
        self.server = grpc.aio.server()
        pb_grpc.add_WeightSyncServicer_to_server(self, self.server)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def name(self, *engines, pool: str = "") -> None:
        self.engines = [(f"{engine.url}/", pool, True) for engine in engines]


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub()
    await made.start()
    yield made
    await made.stop()


@dataclass
class Mesh:
    """A rollout server on a real port, and a client of it."""

    client: RolloutClient
    runner: RolloutRunner
    servicer: RolloutServicer
    server: GrpcServer
    engines: list[ScriptedEngine]

    def doing(self) -> list[str]:
        """Where each rollout that is played here is."""
        return [stage.describe(0.0) for _, _, stage in self.runner._doing()]

    async def collect(self, request: RolloutRequest) -> list[Any]:
        """All events of a group."""
        return [event async for event in self.client.run_rollouts(request)]

    async def played(self, request: RolloutRequest) -> list[Any]:
        """The rollouts of a group, none of which may fail."""
        *events, summary = await self.collect(request)
        assert summary.failed == 0, events
        return events

    async def refused(self, request: RolloutRequest) -> MeshError:
        """The error with which a group is refused."""
        with pytest.raises(MeshError) as caught:
            await self.collect(request)
        return caught.value


StartMesh = Callable[..., Awaitable[Mesh]]


@pytest.fixture
async def start_mesh(tokenizer_dir: Path, tmp_path: Path) -> AsyncIterator[StartMesh]:
    """Starts rollout servers: `await start_mesh(engines, env=[...], **config)`."""
    async with AsyncExitStack() as stack:

        async def start(engines: list[ScriptedEngine], **options: Any) -> Mesh:
            options.setdefault("env", [{"id": "mesh_echo"}])
            options.setdefault("workers", 0)
            client = {"base_url": [engine.url for engine in engines], "probe_interval_s": 0.1, "failover_s": 2.0}
            config = RolloutConfig(
                client={**client, **options.pop("client", {})},
                model={"name": "policy"},
                tokenizer=options.pop("tokenizer", str(tokenizer_dir)),
                output_dir=tmp_path,
                server={"port": 0},
                **{
                    "seq_len": 512,
                    "sampling": {"max_tokens": 16, "temperature": 0.7},
                    "renderer": {"name": "default"},
                    **options,
                },
            )
            runner = await build(config, stack, TracerProvider().get_tracer("test"))
            server, servicer = GrpcServer(config.server), RolloutServicer(runner)
            server.add(SERVICE, add_to_server, servicer)
            port = await server.start()
            server.set_serving()
            stack.push_async_callback(server.drain, 0.0)
            stack.push_async_callback(runner.drain, 0.0)
            rollout_client = await stack.enter_async_context(RolloutClient(f"127.0.0.1:{port}"))
            return Mesh(rollout_client, runner, servicer, server, engines)

        yield start


def group(**fields: Any) -> RolloutRequest:
    """A request of one group; every field may be given."""
    defaults: dict[str, Any] = {
        "request_id": str(uuid.uuid4()),
        "group_id": f"group-{uuid.uuid4().hex[:8]}",
        "environment": "mesh_echo",
        "task_index": 0,
        "group_size": 1,
        "deadline_s": 60.0,
    }
    if "task_payload" in fields:
        del defaults["task_index"]
    return RolloutRequest(**{**defaults, **fields})


@pytest.fixture
def make_group() -> Callable[..., RolloutRequest]:
    return group


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has what waits for a time of the event loop wait so many seconds less."""

    def jump(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)

    return jump


@pytest.fixture
def make_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def tokens() -> Callable[[str], list[int]]:
    return encode
