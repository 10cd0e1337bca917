"""The paths of bench_rollouts that play episodes: through the rollout service's servicer, or verifiers' EnvServer.

Runs in a client process (`rollout_load`), so that its CPU is that of rollouts alone: the engine is another process, and
so is the client of the EnvServer. Tasksets are `bench_words`, `bench_tools` and the bundled reverse_text.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import uuid
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from rollout_load import TOOL_TURNS, Play, Target

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_TOKENS = 20  # about what the template adds to a prompt, a character a token
TOOL_CALL = '<tool_call>{"name": "text_length", "arguments": {"word": "house"}}</tool_call>'
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "rollouts": {"id": "bench_words"},
    "reverse": {"id": "reverse_text"},
    "tools": {"id": "bench_tools"},
}
RENDERER = {"name": "default", "tool_parser": "qwen3"}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of single characters, filled up to `vocab_size` with words that no prompt has."""
    from character_tokenizer import ALPHABET, SPECIAL, save_character_tokenizer

    marks = ["<tools>", "<tool_call>", "</tool_call>"]
    first = len(SPECIAL) + len(ALPHABET) + len(marks)
    save_character_tokenizer(folder, CHAT_TEMPLATE, marks, words=[f"w{number} " for number in range(first, vocab_size)])


async def open_path(path: str, target: Target, stack: AsyncExitStack, number: int) -> Play:
    """Starts what plays the episodes of `path` here; `stack` ends it."""
    # verifiers loads tasksets as top-level modules, in the tool server's process too.
    tasksets = str(Path(__file__).parent / "tasksets")
    sys.path.append(tasksets)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tasksets, os.environ.get("PYTHONPATH"))))
    if path == "envserver":
        return await _envserver(target, stack)
    return await _rollouts(path, target, stack, number)


async def _rollouts(path: str, target: Target, stack: AsyncExitStack, number: int) -> Play:
    """One group of rollouts through the rollout service's servicer, up to the bytes of its messages."""
    from loguru import logger
    from opentelemetry.sdk.trace import TracerProvider

    from meshrl.rollout.config import RolloutConfig
    from meshrl.rollout.main import build
    from meshrl.rollout.service import RolloutServicer
    from meshrl.v1 import rollout_pb2 as pb
    from meshrl.wire import convert
    from meshrl.wire.types import RolloutRequest

    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    tools = path == "tools"
    entry = dict(ENVIRONMENTS[path])
    if path != "reverse":
        entry["args"] = {"characters": max(1, target.prompt_tokens - TEMPLATE_TOKENS)}
    length = 2 * target.prompt_tokens + target.new_tokens
    config = RolloutConfig(
        client={"base_url": [target.url], "logprobs_mode": "processed_logprobs"},
        model={"name": target.model},
        tokenizer=target.tokenizer,
        renderer=RENDERER,
        env=[entry],
        sampling={"max_tokens": len(TOOL_CALL) if tools else target.new_tokens, "temperature": 1.0},
        seq_len=length + TOOL_TURNS * 150 if tools else max(length, 400),
        max_turns=TOOL_TURNS if tools else None,
        max_concurrent=65536,
        **({"workers": 0} if "workers" in RolloutConfig.model_fields else {}),  # in this process
        output_dir=Path(target.tokenizer) / f"client_{number}",
    )
    servicer = RolloutServicer(await build(config, stack, TracerProvider().get_tracer("bench")))
    gc.collect()
    gc.freeze()  # as the program does
    next_task = 0

    async def one() -> int:
        nonlocal next_task
        next_task += 1
        request = RolloutRequest(
            request_id=str(uuid.uuid4()),
            group_id=str(uuid.uuid4()),
            environment=entry["id"],
            task_index=next_task % 100,
            group_size=target.group_size,
            deadline_s=600.0,
        )
        tokens = 0
        async for sent in servicer.RunRollouts(convert.to_proto(request), None):
            event = pb.RunRolloutsResponse.FromString(sent)
            if event.HasField("failure"):
                raise RuntimeError(f"a rollout failed: {event.failure.message}")
            if tools and event.HasField("rollout") and event.rollout.num_turns != TOOL_TURNS:
                raise RuntimeError(f"{TOOL_TURNS} turns were to be played, not {event.rollout.num_turns}")
            if event.HasField("summary"):
                tokens = event.summary.sampled_tokens
        return tokens

    return one


async def _envserver(target: Target, stack: AsyncExitStack) -> Play:
    """One episode through verifiers' EnvServer, with this project's in-process harness: its own start a program for
    each rollout. The server is in this process and its client in another."""
    import verifiers.v1 as vf
    from verifiers.v1.serve.server import EnvServer
    from verifiers.v1.utils.loaders import resolve_env_config

    from meshrl.environments.harness import HarnessHost, InterceptionCalls, hosted_by
    from meshrl.environments.plugins import plugin_id
    from meshrl.environments.tool_connections import ToolConnections

    _let_verifiers_read_renderers()
    config = resolve_env_config(
        {
            "id": "",
            "taskset": {"id": "bench_words", "characters": max(1, target.prompt_tokens - TEMPLATE_TOKENS)},
            "agent": {"harness": {"id": plugin_id("meshrl.environments.harness")}, "runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
    )
    assert isinstance(config, vf.EnvConfig)
    server = EnvServer(config, "tcp://127.0.0.1:0")

    class Interception:
        @property
        def servers(self) -> list[Any]:  # it makes one when it runs
            return [server.env._interception]

    calls, tools = InterceptionCalls(Interception()), ToolConnections(frozenset())
    stack.enter_context(hosted_by(HarnessHost(calls, tools, lambda trace_id, what: None)))
    serving = asyncio.create_task(server.run())

    async def stop() -> None:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    stack.push_async_callback(stop)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    driver = multiprocessing.get_context("spawn").Process(target=_drive, args=(theirs, server.address, target))
    driver.start()
    stack.callback(driver.kill)
    stack.callback(ours.send, None)
    waiting: dict[int, asyncio.Future[int]] = {}
    loop, next_call = asyncio.get_running_loop(), 0

    def take() -> None:
        while ours.poll():
            call, tokens = ours.recv()
            future = waiting.pop(call)
            if isinstance(tokens, str):
                future.set_exception(RuntimeError(tokens))
            else:
                future.set_result(tokens)

    loop.add_reader(ours.fileno(), take)
    stack.callback(loop.remove_reader, ours.fileno())

    async def one() -> int:
        nonlocal next_call
        next_call += 1
        answer = waiting[next_call] = loop.create_future()
        ours.send(next_call)
        return await answer

    return one


def _let_verifiers_read_renderers() -> None:
    """verifiers 0.4.0 asks whether a list of logprobs is empty; renderers 0.1.13 gives it an array, which has no such
    answer, and every model call of the EnvServer fails. Older ones give a list."""
    import renderers.client

    inner = renderers.client.generate

    async def generate(*args: Any, **options: Any) -> dict[str, Any]:
        result = await inner(*args, **options)
        return {**result, "completion_logprobs": np.asarray(result["completion_logprobs"]).tolist()}

    renderers.client.generate = generate


def _drive(pipe: Connection, address: str, target: Target) -> None:
    with asyncio.Runner() as runner:
        runner.run(_ask(pipe, address, target))


async def _ask(pipe: Connection, address: str, target: Target) -> None:
    """The client of the EnvServer: an episode for each number that comes, answered with its sampled tokens."""
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.clients import TrainClientConfig
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.types import SamplingConfig

    sys.path.append(str(Path(__file__).parent / "tasksets"))
    from bench_words import WordsConfig, WordsTaskset

    characters = max(1, target.prompt_tokens - TEMPLATE_TOKENS)
    tasks = iter(WordsTaskset(WordsConfig(id="bench_words", characters=characters)).load())
    rows = [next(tasks).data.model_dump(mode="json") for _ in range(100)]
    endpoint = TrainClientConfig(
        base_url=f"{target.url}/v1",
        api_key_var="MESHRL_API_KEY",
        renderer_model_name=target.tokenizer,
        renderer=DefaultRendererConfig(),
    )
    sampling = SamplingConfig(max_tokens=target.new_tokens, temperature=1.0)
    client = EnvClient(address)
    running: set[asyncio.Task[None]] = set()

    async def play(call: int) -> None:
        try:
            episode = await client.run(endpoint, target.model, sampling, rows[call % len(rows)])
            errors = [error.message for trace in episode.traces for error in trace.errors]
            pipe.send((call, errors[0] if errors else sum(trace.num_output_tokens for trace in episode.traces)))
        except Exception as error:  # noqa: BLE001 - the benchmark ends with it
            pipe.send((call, repr(error)))

    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        task = asyncio.create_task(play(call))
        running.add(task)
        task.add_done_callback(running.discard)
    await client.close()
