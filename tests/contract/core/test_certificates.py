"""Members of a run know each other by certificates: let in, shut out, renewed, over real channels."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509

from access_matrix import DEADLINE_S, Matrix, member, serving
from grpc_fuzz import CallGenerator, Outcomes, call, methods_of
from grpc_servers import served
from meshrl.client import ChannelOptions, TrainerClient
from meshrl.client.authority import Authority, renew_in_s, request_for, save_certificate
from meshrl.client.credentials import (
    INSECURE,
    CredentialError,
    CredentialFiles,
    Credentials,
    TokenCredentials,
    credentials_of,
)
from meshrl.client.enrollment import join, renew, revoked_members
from meshrl.client.trust import Role, TrustFile
from meshrl.core.config import ConfigError
from meshrl.core.config.schema import SECTION
from meshrl.core.config.shared import TlsConfig
from meshrl.core.credentials.identity import as_member, identify, kept_valid
from meshrl.core.rpc.roles import ROLES_OF
from meshrl.core.telemetry.tracing import Tracing, setup_tracing
from meshrl.inference.config import InferenceConfig
from meshrl.v1 import trainer_pb2, trainer_pb2_grpc
from meshrl.weights.config import WeightsConfig
from meshrl.wire.errors import MeshError, Reason

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def hub(authority: Authority) -> Credentials:
    """A server's credentials: its certificate, and the list of who is revoked."""
    return credentials_of(member(authority, Role.HUB, "hub"))


def options(credentials: Credentials) -> ChannelOptions:
    return ChannelOptions(credentials=credentials, unary_deadline_s=DEADLINE_S, retry_attempts=2)


async def ask(address: str, credentials: Credentials) -> MeshError:
    """How a call of GetTrainer ends."""
    async with _Asker(address, options(credentials)) as client:
        with pytest.raises(MeshError) as refused:
            await client.get_trainer()
    return refused.value


class _Asker(TrainerClient):
    """Asks the hub of these tests."""

    server_role = "hub"


async def test_every_rpc_is_for_the_roles_of_the_table_and_no_other_by_certificate(
    authority: Authority, hub: Credentials
) -> None:
    matrix, roles = Matrix(), set(Role) - {Role.TENANT}  # which has no runs where nobody knows its token
    async with serving(hub) as address:
        for role in roles:
            await matrix.fill(address, credentials_of(member(authority, role, "matrix")), role)
    assert matrix.wrong == []
    assert sum(matrix.told.values()) == len(ROLES_OF) * len(roles)


async def test_who_has_no_certificate_of_the_run_is_refused(
    authority: Authority, hub: Credentials, tmp_path: Path
) -> None:
    good = member(authority, Role.OPERATOR, "good")
    assert good.ca is not None
    foreign = trustme.CA()
    issued = foreign.issue_cert("operator.meshrl")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    foreign.cert_pem.write_to_path(tmp_path / "ca.pem")
    theirs = CredentialFiles.of_folder(tmp_path)
    revoked = member(authority, Role.OPERATOR, "revoked")
    authority.trust.revoke("operator/revoked")
    refused = {
        "plain": INSECURE,
        "none": credentials_of(CredentialFiles(ca=good.ca)),
        "a token in its place": TokenCredentials(authority.trust.add_token(Role.OPERATOR)),
        "of another authority": credentials_of(replace(theirs, ca=good.ca)),
        "expired": credentials_of(member(authority, Role.OPERATOR, "expired", ttl_s=-1.0)),
        "revoked": credentials_of(revoked),
    }
    async with serving(hub) as address:
        assert (await ask(address, credentials_of(good))).reason is Reason.NOT_SUPPORTED
        told = {name: await ask(address, credentials) for name, credentials in refused.items()}
        reverse = await ask(address, credentials_of(replace(good, ca=theirs.ca)))
        posing = await TrainerClient(address, options(credentials_of(good))).why_not_serving(DEADLINE_S)
    assert {name: error.reason for name, error in told.items() if name != "revoked"} == dict.fromkeys(
        set(refused) - {"revoked"}, Reason.UNREACHABLE
    )
    assert told["revoked"].reason is Reason.UNAUTHENTICATED
    assert "operator/revoked is revoked" in told["revoked"].message
    assert reverse.reason is Reason.UNREACHABLE  # a client that trusts another authority does not take this server
    assert "publisher.meshrl" in posing or "verif" in posing.lower()  # a hub is no trainer


class Steps(trainer_pb2_grpc.TrainerServiceServicer):
    """Streams to each of its callers whatever it is told to."""

    def __init__(self) -> None:
        self.callers: list[asyncio.Queue[int]] = []
        self.floods = False

    def say(self, revision: int) -> None:
        for caller in self.callers:
            caller.put_nowait(revision)

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # the contract's name
        said: asyncio.Queue[int] = asyncio.Queue()
        self.callers.append(said)
        yield trainer_pb2.WatchStepsResponse(revision=1)
        while True:
            revision = 1 if self.floods else await said.get()
            yield trainer_pb2.WatchStepsResponse(revision=revision)


@asynccontextmanager
async def watched(hub: Credentials, caller: Credentials) -> AsyncIterator[tuple[Steps, Any, Any]]:
    """A standing stream from a server with `hub`'s credentials to a caller, and the caller's channel."""
    steps, adder = Steps(), trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    async with (
        served("meshrl.v1.TrainerService", adder, steps, credentials=hub) as address,
        caller.open_channel(address, [], Role.HUB) as channel,
    ):
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        stream = stub.WatchSteps(trainer_pb2.WatchStepsRequest(), timeout=DEADLINE_S)
        assert (await stream.read()).revision == 1
        yield steps, stream, stub
        stream.cancel()


async def test_certificates_are_renewed_on_both_sides_without_a_dropped_stream(authority: Authority) -> None:
    server, caller = member(authority, Role.HUB, "renewed"), member(authority, Role.OPERATOR, "renewed")
    assert server.cert is not None
    assert caller.cert is not None
    before = server.cert.read_bytes(), caller.cert.read_bytes()
    async with watched(credentials_of(server), credentials_of(caller)) as (steps, stream, stub):
        member(authority, Role.HUB, "renewed")
        member(authority, Role.OPERATOR, "renewed")
        assert (server.cert.read_bytes(), caller.cert.read_bytes()) != before
        another = stub.WatchSteps(trainer_pb2.WatchStepsRequest(), timeout=DEADLINE_S)  # over a new connection
        assert (await another.read()).revision == 1
        steps.say(2)
        assert [(await each.read()).revision for each in (stream, another)] == [2, 2]
        another.cancel()
        steps.say(3)
        assert (await stream.read()).revision == 3


async def test_a_stream_of_a_member_ends_once_it_is_revoked(authority: Authority) -> None:
    server = member(authority, Role.HUB, "ending")
    caller = member(authority, Role.OPERATOR, "ending")
    async with watched(credentials_of(server), credentials_of(caller)) as (_, stream, _stub):
        assert authority.trust.revoke("operator/ending") == ["operator/ending"]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "operator/ending is revoked" in ended.value.details()


async def test_a_stream_that_never_stops_ends_as_well(authority: Authority) -> None:
    server = member(authority, Role.HUB, "busy")
    caller = member(authority, Role.OPERATOR, "busy")
    async with watched(credentials_of(server), credentials_of(caller)) as (steps, stream, _stub):
        steps.floods = True
        steps.say(1)
        authority.trust.revoke("operator/busy")
        async for _ in arriving(stream):
            pass
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def arriving(stream: Any) -> AsyncIterator[Any]:
    """What a stream brings until it ends, however it does."""
    with suppress(grpc.aio.AioRpcError):
        while (message := await stream.read()) is not grpc.aio.EOF:
            yield message


async def test_a_host_joins_by_a_token_renews_and_learns_who_is_revoked(
    authority: Authority, entry: str, tmp_path: Path
) -> None:
    token = authority.trust.add_token(Role.AGENT, 3600.0, hosts=["LocalHost.", "10.1.0.0/16"])
    hosts = ["localhost", "10.1.2.3"]
    joined = await join(tmp_path / "e1", entry, token=token, ca_hash=authority.fingerprint, name="e1", hosts=hosts)
    assert joined == ("main", Role.AGENT)
    files = CredentialFiles.of_folder(tmp_path / "e1")
    assert files.cert is not None
    assert files.key is not None
    key, first = files.key.read_bytes(), files.cert.read_bytes()
    assert 15.9 * 3600 < renew_in_s(files.cert) < 16.0 * 3600  # two thirds of a day
    credentials = credentials_of(files)
    await renew(tmp_path / "e1", credentials)
    assert files.key.read_bytes() == key  # it never leaves the host
    assert files.cert.read_bytes() != first
    authority.trust.note_member(Role.ROLLOUT, "gone", "x")
    authority.trust.revoke("rollout/gone")
    assert ("rollout", "gone") in await revoked_members(tmp_path / "e1", credentials)
    authority.trust.revoke(token.partition(".")[0])  # with all that came by it
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await refused(tmp_path / "e1", credentials) is Reason.UNAUTHENTICATED:
                break
            await asyncio.sleep(0.2)


async def refused(folder: Path, credentials: Credentials) -> Reason | None:
    """Why a renewal is refused; None where it is not."""
    try:
        await renew(folder, credentials)
    except MeshError as error:
        return error.reason
    return None


@asynccontextmanager
async def changing(read: Callable[[], object]) -> AsyncIterator[None]:
    """Waits, at the end, until what `read` gives is another than at the beginning."""
    before = read()
    yield
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if read() != before:
                return
            await asyncio.sleep(0.1)


async def test_a_program_on_the_authoritys_host_renews_its_certificate_in_time(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("MESHRL_TLS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = identify(TlsConfig(), authority.folder.parent, Role.ORCHESTRATOR, "h-1")
    assert found is not None
    files = CredentialFiles.from_environ(os.environ)
    assert files.cert is not None
    assert files.trust == authority.trust.path.resolve()
    member(authority, Role.ORCHESTRATOR, "h-1", ttl_s=100.0)  # counts from five minutes ago: two thirds are over
    async with kept_valid(found, Role.ORCHESTRATOR, "h-1"), changing(files.cert.read_bytes):
        pass
    assert renew_in_s(files.cert) > 15.9 * 3600


async def test_a_program_finds_its_port_taken_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(config: WeightsConfig, stop: asyncio.Event, tracing: Tracing) -> int:
        raise AssertionError("it was started")

    monkeypatch.delenv(SECTION, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = WeightsConfig(server={"port": taken.getsockname()[1]})
        with pytest.raises(ConfigError, match=r"another process listens there; set another server\.port, 0 for"):
            await as_member(Role.HUB, load)(config, asyncio.Event(), setup_tracing("weights", None))


def test_the_orchestrator_of_a_run_in_a_mesh_has_a_certificate_of_the_meshs_authority(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MESHRL_TLS_")}
    monkeypatch.setattr(os, "environ", environ)
    identify(TlsConfig(), authority.folder.parent / "run_letters", Role.ORCHESTRATOR, "h-1")
    assert CredentialFiles.from_environ(environ).cert == (authority.folder / "orchestrator-h-1" / "cert.pem").resolve()


async def test_an_engine_on_the_authoritys_host_has_a_certificate_for_where_it_is_published(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("MESHRL_TLS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    engine = InferenceConfig(server={"host": "0.0.0.0"}, url="https://203.0.113.5:8000")
    beside = InferenceConfig(server={"host": "10.0.0.5"})
    for config, host in ((engine, "203.0.113.5"), (beside, "10.0.0.5")):
        monkeypatch.delenv("MESHRL_TLS_CERT", raising=False)
        for variable in ("CA", "KEY", "TRUST"):
            monkeypatch.delenv(f"MESHRL_TLS_{variable}", raising=False)
        assert config.hosts() == (host,)
        found = identify(TlsConfig(), authority.folder.parent, Role.AGENT, "e-1", config.hosts())
        cert = CredentialFiles.from_environ(os.environ).cert
        assert cert is not None
        named = x509.load_pem_x509_certificate(cert.read_bytes()).extensions
        addresses = named.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.IPAddress)
        assert ip_address(host) in addresses
        before = cert.read_bytes()
        authority.issue(cert.parent, Role.AGENT, "e-1", hosts=[host], ttl_s=100.0)
        async with kept_valid(found, Role.AGENT, "e-1", config.hosts()), changing(cert.read_bytes):
            assert cert.read_bytes() != before
        renewed = x509.load_pem_x509_certificate(cert.read_bytes()).extensions
        assert renewed.get_extension_for_class(x509.SubjectAlternativeName) == named.get_extension_for_class(
            x509.SubjectAlternativeName
        )


async def test_a_program_that_has_joined_renews_and_learns_who_is_revoked(
    authority: Authority, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, token = tmp_path / "w1", authority.trust.add_token(Role.ROLLOUT)
    authority.trust.note_member(Role.AGENT, "gone", "x")
    await join(folder, entry, token=token, ca_hash=authority.fingerprint, name="w1")
    short = authority.sign(request_for(folder, "w1"), Role.ROLLOUT, "w1", ttl_s=100.0)
    save_certificate(folder, short)
    for variable, value in CredentialFiles.of_folder(folder).variables().items():
        monkeypatch.setenv(variable, value)
    own = TrustFile(folder / "trust.sqlite")
    assert identify(TlsConfig(), tmp_path, Role.ROLLOUT, "any") is None
    async with kept_valid(None, Role.ROLLOUT, "any"):
        async with changing((folder / "cert.pem").read_bytes):
            pass
        async with changing(lambda: ("agent", "gone") in own.read().revoked):
            authority.trust.revoke("agent/gone")
    assert renew_in_s(folder / "cert.pem") > 15.9 * 3600


@pytest.mark.parametrize("wrong", ["token", "expired", "ca_hash", "name", "taken"])
async def test_nobody_joins_without_what_it_takes(authority: Authority, entry: str, tmp_path: Path, wrong: str) -> None:
    asked = {
        "token": authority.trust.add_token(Role.ROLLOUT, -1.0 if wrong == "expired" else 60.0),
        "ca_hash": authority.fingerprint,
        "name": "../up" if wrong == "name" else "worker",
    }
    if wrong == "token":
        asked["token"] += "x"
    if wrong == "ca_hash":
        asked["ca_hash"] = "sha256:" + "0" * 64
    if wrong == "taken":
        authority.trust.note_member(Role.ROLLOUT, "worker", "another token")
    said = {
        "token": "the join token is none of this run", "expired": "the join token has expired",
        "ca_hash": "is not of the run", "name": "a member's name has 1 to 63", "taken": "rollout/worker is taken",
    }  # fmt: skip
    with pytest.raises((MeshError, ValueError), match=said[wrong]):
        await join(tmp_path / "w", entry, **asked)
    assert not (tmp_path / "w" / "cert.pem").exists()


async def test_a_wrong_clock_and_a_certificate_that_has_expired_are_named_before_anything_starts(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = member(authority, Role.ROLLOUT, "away", ttl_s=-1.0)
    monkeypatch.setattr("meshrl.client.authority.BACKDATED_S", -3600.0)  # as if this host's clock were an hour behind
    late = member(authority, Role.HUB, "late", ttl_s=7200.0)
    for files, said in ((expired, "was valid until"), (late, r"is valid from .* set the one that is wrong")):
        monkeypatch.setattr(os, "environ", {**os.environ, **files.variables()})
        with pytest.raises(ConfigError, match=said):
            identify(TlsConfig(), tmp_path, Role.ROLLOUT, "any")
    token = authority.trust.add_token(Role.ROLLOUT)
    async with serving(credentials_of(late)) as address:
        with pytest.raises(MeshError, match=r"is valid from .* set the one that is wrong"):
            await join(tmp_path / "w", address, token=token, ca_hash=authority.fingerprint, name="w")


async def test_a_server_behind_tls_answers_all_noise_with_a_status(authority: Authority, hub: Credentials) -> None:
    outcomes, generator = Outcomes(), CallGenerator(3, {})
    async with serving(hub) as address, AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                credentials_of(member(authority, role, "fuzz")).open_channel(address, [], Role.HUB)
            )
            for role in (Role.OPERATOR, Role.VIEWER, Role.AGENT)
        ]
        methods = await methods_of(channels[0])
        for number in range(150):
            method = methods[number % len(methods)]
            sent = generator.messages(method, {})
            deadline_s = 0.3 if method.descriptor.server_streaming else DEADLINE_S
            outcomes.record(method, sent, await call(channels[number % 3], method, sent, deadline_s))
    assert outcomes.codes.total() == 150
    assert {code for _, code in outcomes.codes} >= {"PERMISSION_DENIED", "UNIMPLEMENTED"}
    assert not outcomes.wrong, "\n".join(outcomes.wrong[:10])


def test_an_authority_signs_no_name_of_a_role_and_no_broken_request(authority: Authority, tmp_path: Path) -> None:
    request = request_for(tmp_path, "x")
    for hosts, changed in (
        (["relay.meshrl"], request),
        ([], request[:-60] + b"A" * 10 + request[-50:]),
        ([], b"no PEM"),
    ):
        with pytest.raises(ValueError, match=r"names roles|cannot be read|signed with its own key"):
            authority.sign(changed, Role.ROLLOUT, "x", hosts=hosts)
    save_certificate(tmp_path, authority.sign(request, Role.ROLLOUT, "x"))
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CredentialError, match=r"tls.cert is set without tls.key; set both"):
        credentials_of(CredentialFiles(cert=tmp_path / "cert.pem"))
    (tmp_path / "token").write_text(f"token    id.secret\nca-hash  {authority.fingerprint}\n")  # all that was printed
    with pytest.raises(CredentialError, match=r"holds no token; write there ID\.SECRET alone"):
        credentials_of(CredentialFiles(token=tmp_path / "token"))
