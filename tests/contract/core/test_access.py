"""Who may call what, over real channels: every RPC by every role, by token and by certificate."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from access_matrix import DEADLINE_S, Matrix, serving
from grpc_servers import served
from meshrl.client import ChannelOptions, TrainerClient, WeightSyncClient
from meshrl.client.credentials import INSECURE, CredentialFiles, TokenCredentials, credentials_of
from meshrl.client.trust import Role, TrustFile
from meshrl.core.rpc.guard import FRESH_S, UNKNOWN_FRESH_S, Caller, Guard
from meshrl.core.rpc.roles import ROLES_OF
from meshrl.v1 import trainer_pb2, trainer_pb2_grpc
from meshrl.wire.errors import MeshError, Reason


@pytest.fixture
def trust(tmp_path: Path) -> TrustFile:
    file = TrustFile(tmp_path / "credentials" / "trust.sqlite")
    file.create()
    return file


async def test_every_rpc_is_for_the_roles_of_the_table_and_no_other_by_token(trust: TrustFile) -> None:
    runs = {Role.TENANT: ["team-a-*"]}
    matrix, tokens = Matrix(), {role: trust.add_token(role, runs=runs.get(role, ())) for role in Role}
    async with serving(credentials_of(CredentialFiles(trust=trust.path))) as address:
        for role, token in tokens.items():
            await matrix.fill(address, TokenCredentials(token), role)
    assert matrix.wrong == []
    assert sum(matrix.told.values()) == len(ROLES_OF) * len(Role)
    assert matrix.told[Reason.PERMISSION_DENIED] == sum(len(Role) - len(allowed) for allowed in ROLES_OF.values())


async def test_who_shows_no_token_or_one_that_does_not_count_is_told_what_to_do(trust: TrustFile) -> None:
    revoked, expired = trust.add_token(Role.OPERATOR), trust.add_token(Role.OPERATOR, ttl_s=-1.0)
    good = trust.add_token(Role.OPERATOR)
    assert trust.revoke(revoked.partition(".")[0]) == [f"token {revoked.partition('.')[0]}"]
    cases = {
        "wants a token in the metadata `authorization: Bearer ID.SECRET`": INSECURE,
        "the token is revoked; get another": TokenCredentials(revoked),
        "the token has expired; get another": TokenCredentials(expired),
        "the token is none of this run": TokenCredentials(good[:-1] + ("a" if good[-1] != "a" else "b")),
    }
    async with serving(credentials_of(CredentialFiles(trust=trust.path))) as address:
        for said, credentials in cases.items():
            async with TrainerClient(address, ChannelOptions(credentials=credentials)) as client:
                await client.wait_until_serving(DEADLINE_S)  # health is for everybody
                with pytest.raises(MeshError, match=said) as refused:
                    await client.drain(DEADLINE_S)
            assert refused.value.reason is Reason.UNAUTHENTICATED, said


async def test_a_token_made_or_revoked_while_the_server_runs_counts_from_then_on(trust: TrustFile) -> None:
    async with serving(credentials_of(CredentialFiles(trust=trust.path))) as address:
        token = trust.add_token(Role.OPERATOR)
        async with TrainerClient(address, ChannelOptions(credentials=TokenCredentials(token))) as client:
            await refused_for(client, Reason.NOT_SUPPORTED)
            trust.revoke(token.partition(".")[0])
            await refused_for(client, Reason.UNAUTHENTICATED)


async def test_an_expired_token_makes_no_new_call_and_lets_one_that_runs_go_on(trust: TrustFile) -> None:
    guard = Guard(trust, mutual=False)
    id_, _, secret = trust.add_token(Role.OPERATOR, ttl_s=-1.0).partition(".")
    caller = Caller(role=Role.OPERATOR, name=id_, token=(id_, secret))
    await asyncio.sleep(2 * UNKNOWN_FRESH_S)
    assert "has expired" in str(guard.why_not(caller))
    assert guard.why_not(caller, standing=True) is None
    trust.revoke(id_)
    await asyncio.sleep(1.1 * FRESH_S)
    assert "is revoked" in str(guard.why_not(caller, standing=True))


async def refused_for(client: TrainerClient, reason: Reason) -> None:
    """Calls until the server refuses for this reason."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with pytest.raises(MeshError) as refused:
                await client.get_trainer()
            if refused.value.reason is reason:
                return
            await asyncio.sleep(0.1)


async def test_without_credentials_a_server_on_loopback_asks_nobody() -> None:
    async with serving(INSECURE) as address, WeightSyncClient(address) as client:
        with pytest.raises(MeshError) as refused:
            await client.list_engines()
    assert refused.value.reason is Reason.NOT_SUPPORTED


def test_the_file_of_tokens_is_its_owners_alone_and_holds_no_secret(trust: TrustFile) -> None:
    token = trust.add_token(Role.OPERATOR)
    assert stat.S_IMODE(trust.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(trust.path.parent.stat().st_mode) == 0o700
    assert token.partition(".")[2].encode() not in trust.path.read_bytes()


class ThreeRuns(trainer_pb2_grpc.TrainerServiceServicer):
    async def ListRuns(self, request: object, context: object) -> trainer_pb2.ListRunsResponse:  # noqa: N802 - gRPC's name
        return trainer_pb2.ListRunsResponse(runs=[{"run_id": name} for name in ("main", "team-a-1", "team-b-1")])


async def test_a_tenant_lists_its_own_runs_and_an_operator_all(trust: TrustFile) -> None:
    tokens = {trust.add_token(Role.TENANT, runs=["team-a-*"]): ["team-a-1"]}
    tokens[trust.add_token(Role.OPERATOR)] = ["main", "team-a-1", "team-b-1"]
    adder, checked = trainer_pb2_grpc.add_TrainerServiceServicer_to_server, CredentialFiles(trust=trust.path)
    async with served("meshrl.v1.TrainerService", adder, ThreeRuns(), credentials=credentials_of(checked)) as address:
        for token, seen in tokens.items():
            async with TrainerClient(address, ChannelOptions(credentials=TokenCredentials(token))) as client:
                assert [run.run_id for run in await client.list_runs()] == seen
