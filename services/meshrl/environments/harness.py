"""Plays an agent's side of an episode inside the rollout process: a chat loop that asks for one completion at a time.

verifiers' own harnesses start a program for each rollout; this coroutine costs milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from aiohttp import web
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.errors import HarnessError, InterceptionError
from verifiers.v1.harness import Harness, HarnessSession
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp
from verifiers.v1.interception import Interception, InterceptionServer
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import Messages, ToolCall

from meshrl.environments.tool_connections import ToolConnections
from meshrl.wire.values import JsonObject

__all__ = [
    "HarnessHost",
    "InProcessHarness",
    "InProcessHarnessConfig",
    "InterceptionCalls",
    "hosted_by",
]

TOOL_DISCOVERY_DEADLINE_S = 60.0
OK = ProgramResult(exit_code=0, stdout="", stderr="")


class InterceptionCalls:
    """Calls the handlers of interception servers in this process, since connections cost a fifth of a worker's CPU."""

    def __init__(self, interception: Interception) -> None:
        self._interception = interception
        self._handlers = cache(_handlers_of)

    async def post(self, path: str, secret: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; the rollout's own deadline ends the call. Raises InterceptionError when no
        rollout has that secret."""
        servers = getattr(self._interception, "servers", [self._interception])  # a pool has several
        server = next((server for server in servers if secret in server.sessions), None)
        if server is None:
            raise InterceptionError("the rollout has ended at the interception server")
        # A task of its own, which the server cancels when the rollout ends.
        response = await asyncio.create_task(self._handlers(server)[path](_Request(path, secret, body)))
        assert isinstance(response.body, bytes)
        return response.status, response.body


def _handlers_of(server: InterceptionServer) -> dict[str, Callable[[_Request], Coroutine[Any, Any, web.Response]]]:
    routes = server.runner.app.router.routes()
    return {route.resource.canonical: route.handler for route in routes if route.method == "POST"}


class _Request(dict[object, object]):
    """What a handler reads of a request, without a connection that it came on."""

    def __init__(self, path: str, secret: str, body: bytes) -> None:
        self.path = path
        self.headers = {"Authorization": f"Bearer {secret}"}
        self._read_bytes: bytes | None = body

    async def read(self) -> bytes:
        assert self._read_bytes is not None  # it is read once
        return self._read_bytes


@dataclass(frozen=True)
class HarnessHost:
    """What conversations share. `doing` gets a conversation's trace id and its wait besides the model, "" when that is
    over."""

    interception: InterceptionCalls
    tools: ToolConnections
    doing: Callable[[str, str], None]


_HOST: ContextVar[HarnessHost] = ContextVar("harness_host")


@contextmanager
def hosted_by(host: HarnessHost) -> Iterator[None]:
    token = _HOST.set(host)
    try:
        yield
    finally:
        _HOST.reset(token)


class InProcessHarnessConfig(HarnessConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The options of every harness."""


class InProcessHarness(Harness[InProcessHarnessConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """A chat loop with the taskset's tools; the model gets no shell and no files."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *given: Any, **named: Any) -> HarnessSession:
        return ChatSession(self, *given, **named)

    async def launch(self, *given: Any, **named: Any) -> ProgramResult:
        raise NotImplementedError("a session plays all segments of a conversation")


class ChatSession(HarnessSession):  # type: ignore[misc]  # verifiers is untyped for the checker
    """An agent's messages, connections and tools, from one user turn to the next."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._stack = AsyncExitStack()
        self._host = _HOST.get()
        self._tools: list[JsonObject] = []
        self._dispatch: dict[str, tuple[str, str]] = {}
        self._servers: dict[str, MCPConnection] = {}
        self._messages: list[JsonObject] = []
        system, prompt = self.harness.resolve_prompt(self.data)
        if system:
            self._messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            self._messages.extend(map(message_to_wire, prompt))

    async def _run(self, messages: Messages | None) -> ProgramResult:
        """Succeeds also when a limit or stop of the rollout ended the conversation. Raises HarnessError when a model
        call failed, InterceptionError when the interception server cannot be reached."""
        if self.mcp_urls and not self._servers:
            await self._connect_tools()
        self._messages.extend(map(message_to_wire, messages or ()))
        while calls := await self._complete():
            for call in calls:
                self._messages.append(await self._use_tool(call))
        return OK

    async def close(self) -> None:
        await super().close()
        await self._stack.aclose()

    async def _connect_tools(self) -> None:
        timeout_s = self.harness.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout_s} for name, url in self.mcp_urls.items()}
        names = ", ".join(sorted(servers))
        try:
            with self._doing(f"waiting for tool servers ({names}) to list their tools"):
                async with asyncio.timeout(TOOL_DISCOVERY_DEADLINE_S):
                    connection = await self._host.tools.take(servers)
                    self._stack.push_async_callback(self._host.tools.give_back, connection)
        except TimeoutError as error:
            raise HarnessError(
                f"tool servers ({names}) did not list their tools in {TOOL_DISCOVERY_DEADLINE_S:g} s"
            ) from error
        self._dispatch, self._servers = connection.dispatch, connection.servers
        disabled = set(self.harness.config.disabled_tools or ())
        self._tools = [tool for tool in connection.tools if tool["function"]["name"] not in disabled]

    async def _complete(self) -> list[ToolCall]:
        body: dict[str, object] = {"model": self.ctx.model, "messages": self._messages}
        if self._tools:
            body["tools"] = self._tools
        status, raw = await self._post("/v1/chat/completions", body)
        if status == 200:
            message = json.loads(raw)["choices"][0]["message"]
            self._messages.append(message)
            return parse_message(message).tool_calls or []
        if self.trace.stop_condition is not None:
            return []
        refusal = raw.decode(errors="replace")
        overflow = status in (400, 413) and any(marker in refusal.casefold() for marker in CONTEXT_OVERFLOW_MARKERS)
        if overflow and self.trace.num_turns:  # a length limit, not a fault: the rollout is scored as it stands
            self.trace.stop("max_total_tokens")
            return []
        raise HarnessError(f"model call answered {status}: {refusal[-2000:]}")

    async def _post(self, path: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        return await self._host.interception.post(path, self.secret, json.dumps(body).encode())

    async def _use_tool(self, call: ToolCall) -> JsonObject:
        name, arguments = call.name, call.arguments or "{}"
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError as error:
            parsed = None
            content: object = f"error: the arguments are not JSON ({error}); send the call again with valid JSON"
        else:
            content = f"error: the arguments must be a JSON object, got {type(parsed).__name__}; send an object"
        denied = await self._gate(call.id, name, arguments if parsed is None else parsed)
        if denied is not None:
            return dict(bound_tool_message(denied))
        if isinstance(parsed, dict) and name in self._dispatch:
            with self._doing(f"in a call of tool {name}"):
                content = await call_mcp(self._servers, self._dispatch, name, parsed)
        elif isinstance(parsed, dict):
            known = ", ".join(sorted(self._dispatch)) or "none"
            content = f"error: unknown tool {name!r}; the tools are: {known}"
        message = {"role": "tool", "tool_call_id": call.id, "name": name, "content": content}
        return dict(bound_tool_message(message))

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._host.doing(self.trace.id, what)
        try:
            yield
        finally:
            self._host.doing(self.trace.id, "")

    async def _gate(self, call_id: str, name: str, arguments: object) -> JsonObject | None:
        if not self.tool_interception_url:
            return None
        query = {"tool_call_id": call_id, "name": name, "arguments": arguments}
        status, raw = await self._post("/tool", query)
        if status != 200:
            raise HarnessError(f"tool gate answered {status}: {raw.decode(errors='replace')[-2000:]}")
        verdict = json.loads(raw)
        if verdict["action"] == "stop":
            raise HarnessError(f"tool gate stopped the rollout: {verdict['reason']}")
        denied: JsonObject | None = verdict["message"] if verdict["action"] == "deny" else None
        return denied
