"""A taskset with tools: the in-process harness lists them over MCP and runs the model's calls."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from verifiers.v1.harnesses.utils.mcp import MCPConnection

from meshrl.environments.tool_connections import KEPT_S, ToolConnections

TOOL_CALL, TOOL_CALL_END = 99, 100  # where the fixture's tokenizer has its two marks

# verifiers 0.4 passes an argument of tenacity by its old name when it connects to a tool server.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")


@pytest.fixture
async def tools_url() -> AsyncIterator[str]:
    """A tool server as verifiers would start one, without the seconds that a process of its own takes."""
    server = MCPServer("text")
    server.add_tool(lambda word: str(len(word)), name="length", description="Counts the characters of a word.")
    over = asyncio.Event()

    async def wait() -> str:
        await over.wait()
        return ""

    server.add_tool(wait, name="wait", description="Waits.")
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(json_response=True, stateless_http=True, transport_security=security)
    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    task = asyncio.create_task(http._serve(sockets=[listener]))  # `serve` would take over the signals of pytest
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    over.set()
    http.should_exit = True
    await task


@pytest.fixture
def start_tools(start_mesh, engine, tools_url: str) -> Callable[[], Awaitable[Any]]:
    """Starts a service whose environment has the tools."""
    return lambda: start_mesh(
        [engine],
        env=[{"id": "mesh_tools", "args": {"tools_url": tools_url}}],
        renderer={"name": "default", "tool_parser": "qwen3"},
        sampling={"max_tokens": 100},
        seq_len=1024,
    )


async def test_tool_calls_run_and_their_results_go_back_to_the_model(start_tools, make_group, engine, tokens):
    def call(name: str, arguments: str) -> list[int]:
        text = f'{{"name": "{name}", "arguments": {arguments}}}'
        return [TOOL_CALL, *tokens(text), TOOL_CALL_END]

    replies = [call("text_length", json.dumps({"word": "house"})), call("text_width", "{}"), tokens("5")]
    engine.reply = lambda request: replies[len(engine.requests) - 1]
    mesh = await start_tools()
    request = make_group(environment="mesh_tools")
    events = await mesh.collect(request)
    rollout = events[0]
    assert getattr(rollout, "message", "") == ""
    assert rollout.num_turns == 3
    assert rollout.reward == 1.0
    assert rollout.finish_reason == "stop"
    last_prompt = "".join(chr(29 + token) if 2 < token < 98 else "|" for token in engine.requests[-1]["token_ids"])
    assert "tool text_length" in last_prompt
    assert "unknown tool" in last_prompt
    roles = [span.role for sample in rollout.samples for span in sample.message_spans]
    assert "tool" in roles


async def test_rollouts_share_the_connection_to_a_shared_tool_server_and_a_late_tool_is_named(
    start_tools, make_group, engine, tokens, monkeypatch
):
    """Kept from one rollout to the next, but not after a call on it was broken off."""
    opened, serve = [], MCPConnection.serve

    async def watched(self, *args):
        opened.append(self)
        await serve(self, *args)

    monkeypatch.setattr(MCPConnection, "serve", watched)
    mesh = await start_tools()

    async def play(tool: str, arguments: str, deadline_s: float = 120.0) -> object:
        engine.requests.clear()
        call = [TOOL_CALL, *tokens(f'{{"name": "{tool}", "arguments": {arguments}}}'), TOOL_CALL_END]
        engine.reply = lambda request: call if len(engine.requests) == 1 else tokens("5")
        request = make_group(environment="mesh_tools", deadline_s=deadline_s)
        event, _ = await mesh.collect(request)
        return event

    for _ in range(3):
        rollout = await play("text_length", '{"word": "house"}')
        assert rollout.num_turns == 2
    assert len(opened) == 1
    failure = await play("text_wait", "{}", deadline_s=8.0)
    assert failure.message.startswith("not finished within deadline_s = 8: it was in a call of tool text_wait")
    rollout = await play("text_length", '{"word": "house"}')
    assert rollout.num_turns == 2
    assert len(opened) == 2


async def test_a_kept_connection_asks_again_after_a_while_which_tools_there_are(tools_url):
    now_s = 0.0
    connections = ToolConnections(frozenset({tools_url}), clock=lambda: now_s)
    servers = {"text": {"url": tools_url, "timeout": 60.0}}
    try:
        first = await connections.take(servers)
        await connections.give_back(first)
        now_s = KEPT_S - 1.0
        assert await connections.take(servers) is first
        await connections.give_back(first)
        now_s = KEPT_S + 1.0
        again = await connections.take(servers)
        assert again is not first
        assert again.tools == first.tools
        await connections.give_back(again)
    finally:
        await connections.close()
