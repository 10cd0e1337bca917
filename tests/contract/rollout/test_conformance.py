"""`meshrl conformance` on a rollout service: ours keeps every rule, and servers that break one are named by it."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conformance_kit import verdict
from grpc_servers import served
from meshrl.cli.command import CliError
from meshrl.client.credentials import CredentialFiles, TokenCredentials, credentials_of
from meshrl.client.trust import Role, TrustFile
from meshrl.core.rpc.serve import server_options
from meshrl.rollout.runner import RolloutRunner
from meshrl.rollout.service import SERVICE, RolloutServicer, add_to_server
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.validate import check


async def test_our_rollout_service_keeps_every_rule(start_mesh, engine):
    mesh = await start_mesh([engine])
    assert await verdict(mesh.client.address, "rollout", full=True) == ({}, {})


async def test_our_rollout_service_with_workers_keeps_every_rule_by_the_command(start_mesh, engine):
    mesh = await start_mesh([engine], workers=1)
    command = [sys.executable, "-m", "meshrl.cli.main", "conformance", "--full", "--json"]
    asked = await asyncio.create_subprocess_exec(
        *command, "--address", mesh.client.address, "--service", "rollout",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(asked.communicate(), 120)
    assert asked.returncode == 0, out + err
    report = json.loads(out)
    assert report["conforms"] is True
    assert {one["rule"]: one["found"] for one in report["rules"] if one["result"] != "keeps"} == {}
    assert len(report["rules"]) >= 20


class Differs(RolloutServicer):
    """Ours, but with requests that `ask` and messages that `change` has altered."""

    def ask(self, request: Any) -> None: ...

    def change(self, message: Any) -> None: ...

    async def RunRollouts(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        self.ask(request)
        async for event in super().RunRollouts(request, context):
            message = pb.RunRolloutsResponse.FromString(event)
            self.change(message)
            yield message


class CountsWrong(Differs):
    """Its summary counts a rollout that nobody saw."""

    def change(self, message: Any) -> None:
        if message.HasField("summary"):
            message.summary.finished += 1


class RefusesLate(Differs):
    """It refuses a group that it cannot begin before its deadline."""

    def ask(self, request: Any) -> None:
        if 0.0 < request.deadline_s < 0.1:
            raise MeshError(Reason.DEADLINE_PASSED, "no worker came up in time")


class FailsLateOtherwise(Differs):
    """It blames the environment for what is late."""

    def change(self, message: Any) -> None:
        if message.HasField("failure"):
            message.failure.reason = Reason.ENVIRONMENT_FAILED.name


class SpansElsewhere(Differs):
    """Its version spans cover the first token of the prompt, and none that was sampled."""

    def change(self, message: Any) -> None:
        for sample in message.rollout.samples if message.HasField("rollout") else ():
            del sample.version_spans[:]
            sample.version_spans.add(start=0, end=1, version=0)


class HostsEverything(Differs):
    """It takes any environment for its own, and then misses the version."""

    def ask(self, request: Any) -> None:
        if request.environment.startswith("conformance:"):
            raise MeshError(Reason.VERSION_NOT_AVAILABLE, "no engine", retry_after_s=0.1)


class PlaysTwice(Differs):
    """It plays a group again that is asked for twice."""

    def ask(self, request: Any) -> None:
        if request.request_id and not request.linger_s:
            request.request_id = str(uuid.uuid4())


class ForgetsZeros(Differs):
    """It leaves out a reward, as servers of 1.0 do with one that is 0."""

    def change(self, message: Any) -> None:
        if message.HasField("rollout"):
            message.rollout.ClearField("reward")


class BeginsAnew(Differs):
    """It attaches by playing the group once more."""

    def ask(self, request: Any) -> None:
        if request.HasField("after_seq"):
            request.ClearField("after_seq")
            request.request_id, request.group_id = str(uuid.uuid4()), str(uuid.uuid4())


class EndsWithItsStream(Differs):
    """It lists that groups outlive their streams, and cancels them with these."""

    def ask(self, request: Any) -> None:
        request.linger_s = 0.0


def serving(servicer: RolloutServicer, **options: Any) -> AbstractAsyncContextManager[str]:
    return served(SERVICE, add_to_server, servicer, **options)


@pytest.mark.parametrize(
    ("servicer", "rule", "words"),
    [
        (ForgetsZeros, "rollout.presence", "a rollout has no reward"),
        (BeginsAnew, "rollout.reattach", "is another one when it is sent again"),
        (EndsWithItsStream, "rollout.reattach", ""),
        (CountsWrong, "rollout.summary", "streamed were"),
        (SpansElsewhere, "rollout.sample", "version_spans"),
        (HostsEverything, "rollout.unknown-environment", "must end with NOT_FOUND"),
        (PlaysTwice, "rollout.duplicate", "must end with ALREADY_EXISTS"),
        (RefusesLate, "rollout.deadline", "is refused"),
        (FailsLateOtherwise, "rollout.deadline", "failed with ENVIRONMENT_FAILED"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_servicer_that_breaks_a_rule_is_named_by_it(
    start_mesh, engine, servicer: Callable[[RolloutRunner], RolloutServicer], rule: str, words: str
):
    mesh = await start_mesh([engine])
    async with serving(servicer(mesh.runner)) as address:
        broken, _ = await verdict(address, "rollout", full=True)
    assert set(broken) == {rule}, broken
    assert words in broken[rule]


class HealthOfOneName(health_pb2_grpc.HealthServicer):
    """It knows the service and nothing of the server."""

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if request.service != SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        yield await self.Check(request, context)


class BareStatus(RolloutServicer):
    """Its errors are gRPC statuses and no more."""

    async def RunRollouts(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        try:
            check(request)
            async for event in super().RunRollouts(request, context):
                yield event
        except MeshError as error:
            await context.abort(error.reason.code, error.message)

    async def ListEnvironments(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        try:
            check(request)
            return await super().ListEnvironments(request, context)
        except MeshError as error:
            await context.abort(error.reason.code, error.message)


@asynccontextmanager
async def stranger(servicer: RolloutServicer, health: Any, max_message_bytes: int) -> AsyncIterator[str]:
    """A server without the mesh's interceptor, as another language's would be."""
    server = grpc.aio.server(options=server_options(max_message_bytes, 5.0))
    add_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_server_whose_health_does_not_know_the_empty_name_breaks_that_rule(start_mesh, engine):
    mesh = await start_mesh([engine])
    async with stranger(BareStatus(mesh.runner), HealthOfOneName(), 64 * 2**20) as address:
        broken, _ = await verdict(address, "rollout")
    assert set(broken) == {"health.server", "errors.details"}
    assert "NOT_FOUND" in broken["health.server"]
    assert "grpc-status-details-bin" in broken["errors.details"]


async def test_a_server_that_takes_no_more_than_grpc_does_by_itself_breaks_the_rule_on_messages(start_mesh, engine):
    mesh = await start_mesh([engine])
    async with serving(RolloutServicer(mesh.runner), max_message_bytes=4 * 2**20) as address:
        broken, _ = await verdict(address, "rollout")
    assert set(broken) == {"limits.message"}, broken


async def test_a_server_that_asks_who_calls_is_checked_as_far_as_the_role_of_the_token_goes(
    start_mesh, engine, tmp_path
):
    mesh = await start_mesh([engine])
    trust = TrustFile(tmp_path / "trust.sqlite")
    trust.create()
    operator, viewer = (TokenCredentials(trust.add_token(role)) for role in (Role.OPERATOR, Role.VIEWER))
    credentials = credentials_of(CredentialFiles(trust=trust.path))
    async with serving(RolloutServicer(mesh.runner), credentials=credentials) as address:
        assert await verdict(address, "rollout", credentials=operator) == ({}, {})
        broken, unchecked = await verdict(address, "rollout", credentials=viewer)
        assert broken == {}
        assert {"rollout.version", "rollout.cancel"} <= set(unchecked)
        assert all("not for the role" in why for why in unchecked.values())
        with pytest.raises(CliError, match="does not know who calls: name the run's folder with -o"):
            await verdict(address, "rollout")
