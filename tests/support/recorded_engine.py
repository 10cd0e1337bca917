"""An engine that notes what it generated, conversations that make it hard to keep, and the comparison with samples.

Used by the contract tests of the rollout service and by bench_tokens. Its weights are swapped all the time, also in the
middle of a completion; templates strip, rewrite or forget earlier turns.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from character_tokenizer import ALPHABET, END, save_character_tokenizer
from http_servers import serving_http

HEAD = "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
CALLS = "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(content: str) -> str:
    turns = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + content + CALLS + "<|im_end|>\n"
    return HEAD + turns + "{% endfor %}" + TAIL


TEXT = "{{ message['content'] or '' }}"
DEFAULT = {"name": "default", "tool_parser": "qwen3"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "keeps every turn": (template(TEXT), DEFAULT),
    "strips earlier replies": (
        template("{% if message.role != 'assistant' or loop.last %}" + TEXT + "{% endif %}"),
        DEFAULT,
    ),
    "rewrites earlier questions": (template("{% if not loop.last %}(old) {% endif %}" + TEXT), DEFAULT),
    "Qwen3, which strips earlier thinking": (template(TEXT), {"name": "qwen3"}),
    "a template that strips thinking": (
        template("{{ (message['content'] or '').split('</think>')[-1] if not loop.last else message['content'] }}"),
        DEFAULT,
    ),
}
MARKS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
]  # fmt: skip


@dataclass(frozen=True)
class Generated:
    """One completion as the engine made it: prompt and sampled tokens, and each token's logprob and version."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # (T,) float32
    versions: list[int]


@dataclass
class RecordedEngine:
    """Samples at random: thoughts, text, odd tokens and tool calls; a new version after every third call or so."""

    tokenizer: Any
    seed: int = 0
    version: int = 0
    generated: defaultdict[str, list[Generated]] = field(default_factory=lambda: defaultdict(list))
    url: str = ""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RecordedEngine]:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/version", self._version)
        app.router.add_get("/health", self._health)
        async with serving_http(app, access_log=None) as self.url:
            yield self

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "logprobs_mode": "processed_logprobs"})

    def _reply(self) -> list[int]:
        draw, text = self._draw, ""
        if draw.random() < 0.6:
            text += f"<think>{''.join(draw.choices(ALPHABET, k=draw.randrange(6)))}</think>"
        text += "".join(draw.choices(ALPHABET, k=draw.randrange(8)))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if draw.random() < 0.1:  # a token that says nothing, in the middle
            ids.insert(draw.randrange(len(ids) + 1), draw.choice((0, 1)))
        if draw.random() < 0.7:
            word = "x" * draw.randrange(1, 9)
            called = f'<tool_call>{{"name": "text_length", "arguments": {{"word": "{word}"}}}}</tool_call>'
            ids += self.tokenizer.encode(called, add_special_tokens=False)
        return ids

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = [*self._reply(), END][: body["sampling_params"]["max_tokens"]]
        logprobs = -np.array([self._draw.expovariate(1.0) for _ in ids], np.float32)
        if self._draw.random() < 0.3:
            self.version += 1
        cut = self._draw.randrange(len(ids)) if self._draw.random() < 0.4 else 0
        versions = [self.version] * cut
        if cut:  # the weights are swapped in the middle
            self.version += 1
        versions += [self.version] * (len(ids) - cut)
        spans = [[0, cut, versions[0]]] * bool(cut) + [[cut, len(ids), versions[-1]]]
        self.generated[request.headers["X-Session-ID"]].append(Generated(body["token_ids"], ids, logprobs, versions))
        content = [{"token": f"token_id:{token}", "logprob": float(p)} for token, p in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop" if ids[-1] == END else "length",
            "logprobs": {"content": content},
            "version_spans": spans,
        }
        return web.json_response({"request_id": "r", "choices": [choice]})


@dataclass
class Compared:
    """What a comparison saw."""

    rollouts: int = 0
    turns: int = 0
    called: int = 0  # rollouts that called a tool
    samples: int = 0
    tokens: int = 0
    versions: set[int] = field(default_factory=set)
    split: int = 0  # completions of two versions


def called_a_tool(rollout: Any) -> bool:
    return any(span.role == "tool" for sample in rollout.samples for span in sample.message_spans)


def compare(rollouts: Iterable[Any], engine: RecordedEngine) -> Compared:
    """Holds every trained token to what the engine generated. Raises AssertionError at the first difference.

    Each completion is trained exactly once, bit for bit, in a sample that has before it just the tokens which the
    engine saw before it.
    """
    seen = Compared()
    for rollout in rollouts:
        left = list(engine.generated.pop(uuid.UUID(rollout.rollout_id).hex))
        assert rollout.num_turns == len(left)
        seen.rollouts, seen.turns = seen.rollouts + 1, seen.turns + len(left)
        seen.called += called_a_tool(rollout)
        for sample in rollout.samples:
            seen.samples += 1
            versions = np.full(len(sample.token_ids), -1)
            for span in sample.version_spans:
                assert (versions[span.start : span.end] == -1).all()
                versions[span.start : span.end] = span.version
            assert ((versions >= 0) == sample.loss_mask).all()
            assert (sample.logprobs[~sample.loss_mask] == 0.0).all()
            edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
            for start, end in edges.reshape(-1, 2).tolist():
                ids = sample.token_ids.tolist()
                (made,) = [one for one in left if one.prompt_ids == ids[:start] and one.token_ids == ids[start:end]]
                assert sample.logprobs[start:end].tobytes() == made.logprobs.tobytes()
                assert versions[start:end].tolist() == made.versions
                left.remove(made)
                seen.tokens += end - start
                seen.versions.update(made.versions)
                seen.split += len(set(made.versions)) > 1
        assert not left, f"{len(left)} completions are in no sample"
    return seen


@asynccontextmanager
async def tool_server() -> AsyncIterator[str]:
    """A tool server as verifiers would start one, without the seconds that a process of its own takes; its address."""
    import socket

    import uvicorn
    from mcp.server.mcpserver import MCPServer
    from mcp.server.transport_security import TransportSecuritySettings

    server = MCPServer("text")
    server.add_tool(lambda word: str(len(word)), name="length", description="Counts the characters of a word.")
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(json_response=True, stateless_http=True, transport_security=security)
    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    task = asyncio.create_task(http._serve(sockets=[listener]))  # `serve` would take over the process's signals
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    http.should_exit = True
    await task


async def play(
    case: str,
    num_rollouts: int,
    folder: Path,
    *,
    seed: int = 0,
    group_size: int = 5,
    workers: int = 0,
    in_flight: int = 1,
    tools: bool = False,
    serving: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
) -> Compared:
    """Plays conversations with a tool, and with a user, in equal parts, and compares their samples.

    With `tools` only those with a tool, until `num_rollouts` of them called it. `in_flight` groups at once;
    `serving(tokenizer)` is another engine that notes what it generated.
    """
    from opentelemetry.sdk.trace import TracerProvider

    from meshrl.rollout.config import RolloutConfig
    from meshrl.rollout.main import build
    from meshrl.rollout.service import RolloutServicer
    from meshrl.v1 import rollout_pb2 as pb
    from meshrl.wire import convert
    from meshrl.wire.types import Rollout, RolloutRequest

    chat_template, renderer = CASES[case]
    async with AsyncExitStack() as stack:
        tokenizer = save_character_tokenizer(folder, chat_template, MARKS, special=["<|endoftext|>"])
        serving = serving or (lambda loaded: RecordedEngine(loaded, seed).serving())
        engine = await stack.enter_async_context(serving(tokenizer))
        tools_url = await stack.enter_async_context(tool_server())
        config = RolloutConfig(
            client={"base_url": [engine.url]},
            model={"name": "policy"},
            tokenizer=str(folder),
            renderer=renderer,
            env=[{"id": "mesh_tools", "args": {"tools_url": tools_url}}, {"id": "mesh_guess", "args": {"turns": 5}}],
            sampling={"max_tokens": 90, "temperature": 1.0},
            seq_len=2048,
            max_turns=6,
            workers=workers,
            output_dir=folder,
        )
        servicer = RolloutServicer(await build(config, stack, TracerProvider().get_tracer("tokens")))
        rollouts: list[Rollout] = []

        async def group(number: int) -> None:
            request = RolloutRequest(
                request_id=str(uuid.uuid4()),
                group_id=str(uuid.uuid4()),
                environment="mesh_tools" if tools or number % 2 == 0 else "mesh_guess",
                task_index=0,
                group_size=group_size,
                deadline_s=600.0,
            )
            async for event in servicer.RunRollouts(convert.to_proto(request), None):
                if isinstance(event, bytes):  # of a worker
                    event = pb.RunRolloutsResponse.FromString(event)
                assert not event.HasField("failure"), event.failure.message
                if event.HasField("rollout"):
                    rollouts.append(convert.rollout_event_from_proto(event))

        numbers = itertools.count()

        def enough(number: int) -> bool:
            done = sum(map(called_a_tool, rollouts)) if tools else number * group_size
            return done >= num_rollouts

        async def one_after_the_other() -> None:
            while not enough(number := next(numbers)):
                await group(number)

        async with asyncio.TaskGroup() as playing:
            for _ in range(in_flight):
                playing.create_task(one_after_the_other())
    return compare(rollouts, engine)
