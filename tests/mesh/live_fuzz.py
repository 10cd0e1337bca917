"""Calls that no sane client makes, over all methods and routes of a run that trains meanwhile, and what its logs say.

The generators are in `grpc_fuzz` and `http_fuzz`; here is what they are told of the run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc

from grpc_fuzz import CallGenerator, Method, Outcomes, call, methods_of
from http_fuzz import HttpOutcomes, RequestGenerator, send
from mesh_run import PROGRAMS, Run
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.client.credentials import bearer
from meshrl.client.trust import Role
from meshrl.core.rpc.roles import ROLES_OF

GRPC_CALLS = 3000
HTTP_REQUESTS = 1000
AT_ONCE = 24
UPLOADS = 3  # calls of a method that takes a stream for one of another: more can be wrong with them
CALL_DEADLINE_S = 30.0
STREAM_DEADLINE_S = 0.5


def without_request_id(message: Any) -> None:
    message.request_id = ""


def of_no_uuid(message: Any) -> None:
    message.request_id = "no UUID"


def without_url(message: Any) -> None:
    message.url = ""


def of_another_run(message: Any) -> None:
    if message.HasField("manifest"):
        message.manifest.run_id = "another run"
        message.manifest.epoch = 0


def of_no_group(message: Any) -> None:
    del message.group_ids[:]
    message.group_ids.append("no such group")


# Calls that would end or change the run if they were sound: theirs are made so that they must be refused.
DESTRUCTIVE: Mapping[str, Callable[[Any], None]] = {
    "meshrl.v1.TrainerService/Drain": of_no_uuid,  # ends the trainer
    "meshrl.v1.RolloutService/Drain": of_no_uuid,  # ends the rollout program
    "meshrl.v1.WeightSync/Drain": of_no_uuid,  # ends the hub
    "meshrl.v1.WeightSync/CloseRun": of_no_uuid,  # has engines let go of the run's versions
    "meshrl.v1.TrainerService/SaveCheckpoint": without_request_id,  # keeps the trainer from its steps
    "meshrl.v1.RolloutService/CancelRollouts": of_no_group,  # without a group it ends all rollouts
    "meshrl.v1.WeightSync/Register": without_url,  # a version waits for every engine that is registered
    "meshrl.v1.WeightSync/CreateVersion": of_another_run,  # a later epoch takes the run away from its trainer
    "meshrl.v1.WeightSync/AbortVersion": without_request_id,  # takes away what the trainer publishes
    "meshrl.v1.WeightSync/ActivateVersion": without_request_id,  # makes the engines serve another version
    "meshrl.v1.WeightSync/OpenGroup": without_request_id,  # engines leave the group that they are in
}


async def known_values(run: Run) -> Mapping[str, Sequence[Any]]:
    """Values of the live run by the names of the fields that take them, so that some calls get past the door."""
    async with WeightSyncClient(f"127.0.0.1:{run.port('weights')}", run.options()) as hub:
        manifest, artifact_id = await hub.get_manifest()
        engines = await hub.list_engines()
    async with TrainerClient(f"127.0.0.1:{run.port('trainer')}", run.options()) as trainer:
        info = (await trainer.get_trainer()).runs[0]
    return {
        "run_id": ["", info.run_id],
        "artifact_id": [artifact_id],
        "version": [manifest.version, manifest.version + 1],
        "epoch": [manifest.epoch, manifest.epoch + 1],
        "step": [info.step, info.step + 1],
        "environment": ["reverse_text"],
        "group_size": [1, 2],
        "deadline_s": [0.2, 1.0],
        "max_tokens": [1, 4],
        "task_index": [0, 1],
        "engine_pool": ["", *(engine.engine_pool for engine in engines)],
        "engine_id": [engine.engine_id for engine in engines],
        "service": ["meshrl.v1.TrainerService", "", "no such service"],
        "contract_version": ["1.0", "1.9"],
        "request_id": ["2f1c59a4-0b6e-4c5e-9c3e-7b1f6d2a8e10", "8d3f0a52-6c1b-4f7d-a2e9-5b0c4d7e9f13"],
        "group_id": ["one group"],
        "num_micro_batches": [1],
        "digest": ["0" * 64],
        "environments": ["reverse_text"],
        "offset": [0, 16],
        "length": [0, 16],
        "temperature": [0.0, 1.0],
        "top_p": [1.0],
        "top_k": [0],
        "min_p": [0.0],
        "stop_token_ids": [5],
        "seed": [0],
        "dtype": [1, 2, 3],
        "shape": [1, 4],
        "prepare_deadline_s": [0.2],
        "traceparent": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
    }


async def fuzz_grpc(run: Run, seed: int) -> Outcomes:
    """Makes GRPC_CALLS calls over all methods of all servers in turn."""
    outcomes = Outcomes()
    generator = CallGenerator(seed, await known_values(run))
    tokens = {role: run.secret(f"{role}.token") for role in set(Role) - {Role.TENANT}}
    async with AsyncExitStack() as stack:
        methods: dict[str, tuple[grpc.aio.Channel, Method]] = {}
        for program in ("rollout", "trainer", "weights"):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{run.port(program)}"))
            for method in await methods_of(channel):
                methods.setdefault(method.full_name, (channel, method))
        todo = [
            (channel, method)
            for channel, method in methods.values()
            for _ in range(UPLOADS if method.descriptor.client_streaming else 1)
        ]
        left = iter(range(GRPC_CALLS))

        async def caller() -> None:
            for number in left:
                channel, method = todo[number % len(todo)]
                sent = generator.messages(method, DESTRUCTIVE)
                is_stream = method.descriptor.server_streaming
                deadline_s = STREAM_DEADLINE_S if is_stream else CALL_DEADLINE_S
                may = min(ROLES_OF.get(method.full_name, {Role.OPERATOR}))
                shown = bearer(tokens[may])
                outcomes.record(method, sent, await call(channel, method, sent, deadline_s, shown))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(caller())
    refused = {method for method, code in outcomes.codes if code == "INVALID_ARGUMENT"}
    assert refused == set(methods), "each method was sent noise"
    return outcomes


async def fuzz_http(run: Run, seed: int) -> HttpOutcomes:
    """Makes HTTP_REQUESTS requests over all routes of the engine in turn."""
    outcomes = HttpOutcomes()
    generator = RequestGenerator(random.Random(seed), run.secret("engine.key"))
    left = iter(range(HTTP_REQUESTS))

    async def caller() -> None:
        for number in left:
            await send(run.port("inference"), generator.request(number), outcomes)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(caller())
    return outcomes


def tracebacks(run: Run) -> list[str]:
    """The first lines of the tracebacks in all logs of a run, with what led to them."""
    found = []
    for name in ("rl", *PROGRAMS):
        lines = run.log(name).splitlines()
        for number, line in enumerate(lines):
            if "Traceback" in line:
                found.append("\n".join([f"--- {name}", *lines[max(0, number - 1) : number + 30]]))
    return found
