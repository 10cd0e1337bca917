"""One real engine program behind its HTTP server, beside a real weight hub: what the engine contract is tested on.

Both are processes of their own and outlive a test: an engine takes up to a minute and a half to start. Everything a
test asks for goes over HTTP, or through the hub as a trainer would do it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch

from local_ports import free_port
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.core.program import READY_FILE
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import Adapter
from meshrl.wire.types import Activation, ActivationPolicy, AgentState, EngineInfo, Transport, VersionProbe
from plain_model import plain_model, plain_probe, plain_state, save_model
from state_publisher import StatePublisher

API_KEY = "open-sesame"
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 2048
SLOTS = 16
LEASE_S = 12.0  # an agent looks at its engine every third of it, when it has nothing else to say
COMMIT_S = 60.0  # an engine that has not applied by then is out of the pool
START_S = 300.0
STOP_S = 60.0
POLL_S = 0.02
ATTEMPTS = 5
RequestT = TypeVar("RequestT")
SOURCES = tuple(
    str(Path(__file__).parents[2] / part) for part in ("services", "clients/python", "tests/contract/inference")
)  # the last one has programs for tests


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine under test, and how far its numbers may be from those of a plain forward pass in float32."""

    name: str
    python: Path
    dtype: torch.dtype
    clear_margin: float
    """Logits nearer to each other than this may be ranked either way."""
    logprob_atol: float
    logprob_mean: float
    device: str = "cpu"
    family: str = "qwen3"
    """The family of its plain model."""
    module: str = "meshrl.inference.main"
    """What is run as the `inference` program."""
    config: Mapping[str, Any] = field(default_factory=dict)
    broadcast: Mapping[str, Any] = field(default_factory=dict)
    """Of its configuration, how versions come."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


class Program:
    """One program of the mesh, started with a configuration file; its log says where it listens."""

    def __init__(self, python: Path, module: str, config: Mapping[str, Any], folder: Path, name: str) -> None:
        path = folder / f"{name}.toml"
        path.write_text(_toml(config))
        self.log = folder / f"{name}.log"
        self.ready = folder / f"{name}.ready"
        """A file that the program makes once it serves."""

        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            READY_FILE: str(self.ready),
            "PYTHONPATH": os.pathsep.join(filter(None, (*SOURCES, os.environ.get("PYTHONPATH")))),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", module, "@", str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def address(self, pattern: str) -> str:
        """The first group of `pattern` once the log has it. Else it ends the program and fails with the log."""
        end_s = time.monotonic() + START_S
        try:
            while (found := re.search(pattern, self.log.read_text(errors="replace"))) is None:
                assert self.process.poll() is None, f"the program ended early:\n{self.tail()}"
                assert time.monotonic() < end_s, f"not up in {START_S} s:\n{self.tail()}"
                time.sleep(0.1)
        except BaseException:  # also when the tests are broken off: it must not outlive them
            self.stop()
            raise
        return found.group(1)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """SIGKILL for the program alone; whatever it started must notice."""
        group = os.getpgid(self.process.pid)
        self.process.kill()
        self.process.wait(60.0)
        end_s = time.monotonic() + 30.0
        while _is_alive(group):
            assert time.monotonic() < end_s, "processes that the program had started outlive it"
            time.sleep(0.1)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not end it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # the next test must not share the machine with it
            self.process.kill()
            self.process.wait(STOP_S)


def _is_alive(group: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


class EngineMesh:
    """A hub, an engine and what a trainer has published so far."""

    def __init__(
        self, kind: EngineKind, folder: Path, *, seed: int = 0, lease_s: float = LEASE_S, waits: bool = True
    ) -> None:
        """Starts both with the plain model of `seed` as base; publish a version before asking for tokens.

        `waits`: until the engine serves.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.folder, self.base_seed = kind, folder, seed
        self.model_folder = save_model(folder / "model", seed, kind.dtype, family=kind.family)
        hub = {
            "server": {"port": free_port()},
            "output_dir": str(folder),
            "lease_s": lease_s,
            "commit_deadline_s": COMMIT_S,
        }
        self.hub = Program(Path(sys.executable), "meshrl.weights.main", hub, folder, "weights")
        self.hub_address = self.hub.address(r"serving WeightSync at (\S+)")
        self.seed: int | None = None
        self.epoch, self.version = 1, -1
        try:
            self.begin_engine()
            if waits:
                self.await_engine()
        except BaseException:  # whatever it was, the hub must not outlive it
            self.hub.stop()
            raise

    def begin_engine(self) -> None:
        """Starts a new engine, which may take its time to serve."""
        config = {
            "engine": self.kind.name.partition("-")[0],
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": SLOTS,
            "served_model_name": MODEL_NAME,
            "api_key": API_KEY,
            "output_dir": str(self.folder),
            **self.kind.config,
            "model": {"name": str(self.model_folder), "dtype": self.kind.dtype_name, "device": self.kind.device},
            "server": {"port": 0},
            "weight_broadcast": {"address": self.hub_address, **self.kind.broadcast},
        }
        self.engine = Program(self.kind.python, self.kind.module, config, self.folder, "inference")

    def await_engine(self) -> None:
        self.url = self.engine.address(r"on (http://\S+)")

    def restart_engine(self) -> None:
        """A new engine after a test has ended the last one; the hub gives it the newest version."""
        self.begin_engine()
        self.await_engine()

    def other_seed(self) -> int:
        """Of weights that are not the live ones."""
        return 1 if self.seed == 0 else 0

    def close(self) -> None:
        self.engine.stop()
        self.hub.stop()

    # --- what a trainer does ----------------------------------------------------------------------

    async def publish(
        self,
        seed: int,
        *,
        transport: Transport = Transport.FILESYSTEM,
        policy: ActivationPolicy = ActivationPolicy.ROLLING,
    ) -> Activation:
        """Has the plain model of `seed` served as the next version; returns once the engine serves it."""
        state = plain_state(seed, self.kind.dtype, family=self.kind.family)
        await self.seal(state, transport=transport, probe=plain_probe(seed, family=self.kind.family))
        return await self.activate(seed, policy=policy)

    async def publish_state(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        transport: Transport = Transport.FILESYSTEM,
        adapter: Adapter | None = None,
        probe: VersionProbe | None = None,
    ) -> Activation:
        """The same with any weights, or an adapter; they may be refused."""
        self.seed = None
        await self.seal(state, transport=transport, adapter=adapter, probe=probe)
        return await self.activate(None)

    async def seal(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        transport: Transport = Transport.FILESYSTEM,
        adapter: Adapter | None = None,
        probe: VersionProbe | None = None,
    ) -> None:
        """Publishes the next version; the engine prepares it beside its work and serves on with the one before."""
        options = ChannelOptions(unary_deadline_s=30.0, retry_attempts=2, retry_backoff_s=0.05)
        async with WeightSyncClient(self.hub_address, options) as client:
            publisher = StatePublisher(
                client, transport, self.folder / "broadcasts", epoch=self.epoch, adapter=adapter, num_threads=3
            )
            self.version += 1
            await publisher.publish(self.version, state, probe=probe)
            await publisher.close()

    async def until(self, holds: Callable[[EngineInfo], bool], deadline_s: float = 60.0) -> None:
        """Waits until the hub, which may be on its way back, says so of the engine."""
        async with WeightSyncClient(self.hub_address) as hub, asyncio.timeout(deadline_s):
            while not any(holds(engine) for engine in await _engines(hub)):  # noqa: ASYNC110 - nobody tells a test
                await asyncio.sleep(0.05)

    async def activate(
        self,
        seed: int | None,
        *,
        policy: ActivationPolicy = ActivationPolicy.ROLLING,
        hub: WeightSyncClient | None = None,
    ) -> Activation:
        """Has the newest version, which is the plain model of `seed`, served; through a line to the hub that is up."""
        self.seed = None
        async with AsyncExitStack() as stack:
            if hub is None:
                hub = await stack.enter_async_context(
                    WeightSyncClient(self.hub_address, ChannelOptions(unary_deadline_s=60.0))
                )
            activation = await hub.activate_version(
                run_id="run", version=self.version, policy=policy, prepare_deadline_s=60.0
            )
        self.seed = seed
        return activation

    @asynccontextmanager
    async def prepared(self, state: Mapping[str, torch.Tensor], **how: Any) -> AsyncIterator[WeightSyncClient]:
        """With the next version ready in the engine, a line to the hub that is up: to activate it without a wait."""
        await self.seal(state, **how)
        await self.until(lambda engine: engine.state is AgentState.PREPARED)
        async with WeightSyncClient(self.hub_address) as hub:
            await hub.list_engines()
            yield hub

    # --- what a client does -----------------------------------------------------------------------

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {API_KEY}"},
            timeout=aiohttp.ClientTimeout(total=90.0),
            connector=aiohttp.TCPConnector(keepalive_timeout=300.0),
        )


class EngineClient:
    """HTTP calls to one engine, with an answer read whole."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str, **kwargs: Any) -> Answer:
        async with self.session.get(path, **kwargs) as response:
            return await _read(response)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> Answer:
        async with self.session.post(path, json=body, **kwargs) as response:
            return await _read(response)

    async def generate(
        self, prompt: Sequence[int], *, n: int = 1, extra: Mapping[str, Any] | None = None, **sampling: Any
    ) -> list[dict[str, Any]]:
        """The choices of the token route, logprobs included; 40 tokens past any end token unless told otherwise."""
        params = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, "n": n, **sampling}
        body = {"model": MODEL_NAME, "token_ids": list(prompt), "sampling_params": params, **(extra or {})}
        answer = await self.post("/inference/v1/generate", body)
        assert answer.status == 200, answer.body
        choices: list[dict[str, Any]] = answer.body["choices"]
        assert [choice["index"] for choice in choices] == list(range(n))
        return choices

    async def one(self, prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
        return (await self.generate(prompt, **sampling))[0]

    async def greedy(self, prompt: Sequence[int], max_tokens: int = 40, **more: Any) -> dict[str, Any]:
        return await self.one(prompt, temperature=0.0, max_tokens=max_tokens, **more)

    async def version(self) -> dict[str, Any]:
        body: dict[str, Any] = (await self.get("/version")).body
        return body

    async def metrics(self) -> dict[str, float]:
        """The samples of the Prometheus text."""
        text = (await self.get("/metrics")).body
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def begin(
        self, *requests: Coroutine[Any, Any, RequestT], in_flight: int | None = None
    ) -> list[asyncio.Task[RequestT]]:
        """Starts requests, all of them in flight at once (`in_flight`: so many, one each otherwise): the engine is
        paused until it has them, so that none is over before the last has come, on however busy a machine."""
        await self.post("/pause")
        tasks = [asyncio.create_task(request) for request in requests]
        try:
            await self.until_in_flight(len(tasks) if in_flight is None else in_flight)
        finally:
            assert (await self.post("/resume")).status == 200
        return tasks

    async def catch(self, *requests: Callable[[], Coroutine[Any, Any, RequestT]]) -> list[asyncio.Task[RequestT]]:
        """Starts requests and pauses the engine in the midst of all; again where the pause comes too late for that."""
        for _ in range(ATTEMPTS):
            running = await self.begin(*(request() for request in requests))
            await self.one([1], max_tokens=3)  # came last: by now those before it have tokens
            if (await self.post("/pause")).body == {"status": "paused", "in_flight": len(requests)}:
                return running
            await self.post("/resume")
            await asyncio.gather(*running)
        raise AssertionError(f"requests were over before each of {ATTEMPTS} pauses")

    async def until_in_flight(self, count: int, deadline_s: float = 60.0) -> None:
        await self.until("in_flight", count, deadline_s)

    async def until(self, key: str, value: Any, deadline_s: float) -> None:
        """Until /version says `value`."""
        end_s = time.monotonic() + deadline_s
        while (found := await self.version())[key] != value:
            assert time.monotonic() < end_s, f"{key} is not {value} after {deadline_s} s: {found}"
            await asyncio.sleep(POLL_S)


async def _engines(hub: WeightSyncClient) -> tuple[EngineInfo, ...]:
    with suppress(MeshError):  # a hub that was killed is not back yet
        return await hub.list_engines()
    return ()


async def _read(response: aiohttp.ClientResponse) -> Answer:
    is_json = response.content_type == "application/json"
    body = await response.json() if is_json else await response.text()
    return Answer(status=response.status, headers=response.headers, body=body)


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """(T,) of a choice of the token route."""
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def reference(mesh: EngineMesh) -> Any:
    """The plain model whose weights the engine serves."""
    assert mesh.seed is not None, "the live weights are no plain model's; publish one first"
    return plain_model(mesh.seed, family=mesh.kind.family)


def _toml(table: Mapping[str, Any]) -> str:
    """Plain values first, then tables one level deep."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in inner.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | int | float) else f'"{value}"'
