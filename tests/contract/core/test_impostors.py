"""Somebody with a token tries to pose as another server of the run, over real TLS; every try is refused."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from access_matrix import DEADLINE_S, member, serving
from grpc_servers import served
from http_servers import stop_serving
from impostor import NAMES_OF_NOBODY, OTHERS_HOSTS, SPELLINGS_OF_THE_HUB, enroll
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.authority import Authority, names_lack, request_for, save_certificate
from meshrl.client.credentials import CredentialError, CredentialFiles, Credentials, credentials_of
from meshrl.client.enrollment import join, renew
from meshrl.client.names import server_name
from meshrl.client.trust import SERVING, Role, Trust, TrustFile
from meshrl.core.config.shared import TlsConfig
from meshrl.core.credentials.https import client_context
from meshrl.core.credentials.identity import identify, kept_valid
from meshrl.v1 import weights_pb2, weights_pb2_grpc
from meshrl.wire.errors import MeshError, Reason

pytestmark = pytest.mark.timeout(240)


def names_in(cert: bytes | Path) -> set[str]:
    pem = cert.read_bytes() if isinstance(cert, Path) else cert
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


async def refusal(
    authority: Authority, address: str, token: str, name: str, request: bytes, hosts: Sequence[str] = ()
) -> grpc.aio.AioRpcError:
    """The error of an enrolment that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await enroll(authority.fingerprint, address, token, name, request, hosts)
    return refused.value


@pytest.mark.parametrize("role", Role)
async def test_no_role_gets_the_hubs_name_or_a_host_that_was_not_bound_to_its_token(
    authority: Authority, entry: str, tmp_path: Path, role: Role
) -> None:
    bound = [] if role in (Role.OPERATOR, Role.VIEWER, Role.TENANT) else ["e1.example.org", "10.2.0.0/24"]
    token = authority.trust.add_token(role, hosts=bound, runs=["team-*"] if role is Role.TENANT else [])
    request = request_for(tmp_path, "x")
    most = None if role in (Role.HUB, Role.AGENT, Role.TENANT) else 3  # each takes a handshake
    for number, host in enumerate([*SPELLINGS_OF_THE_HUB[:most], *OTHERS_HOSTS[:most]]):
        refused = await refusal(authority, entry, token, f"{role}-try-{number}", request, [host])
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT, host
    granted = names_in(await enroll(authority.fingerprint, entry, token, f"{role}-plain", request))
    assert granted == {server_name(role), *(host for host in bound if "/" not in host)}
    if bound:
        asked = ["E1.Example.ORG.", "10.2.0.7"]
        granted = names_in(await enroll(authority.fingerprint, entry, token, f"{role}-asked", request, asked))
        assert granted == {server_name(role), "e1.example.org", "10.2.0.7"}


async def test_names_in_the_request_itself_do_not_count(authority: Authority, entry: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    wanted = [x509.DNSName("hub.meshrl"), x509.UniformResourceIdentifier("spiffe://meshrl/main/hub/hub")]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub.meshrl")]))
        .add_extension(x509.SubjectAlternativeName(wanted), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    token = authority.trust.add_token(Role.ROLLOUT)
    made = x509.load_pem_x509_certificate(await enroll(authority.fingerprint, entry, token, "quiet", request))
    assert names_in(made.public_bytes(serialization.Encoding.PEM)) == {"rollout.meshrl"}
    assert made.subject.rfc4514_string() == "CN=quiet"
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for name in NAMES_OF_NOBODY:
        assert (await refusal(authority, entry, token, name, request)).code() is grpc.StatusCode.INVALID_ARGUMENT, name


def test_hosts_are_bound_in_one_spelling_and_what_is_none_is_refused(authority: Authority) -> None:
    id_ = authority.trust.add_token(Role.AGENT, hosts=["BÜCHER.example.", "E1.Example.org", "::FFFF:10.0.0.1"])[:10]
    assert authority.trust.read().tokens[id_].scope.hosts == ("xn--bcher-kva.example", "e1.example.org", "10.0.0.1")
    for host in (*SPELLINGS_OF_THE_HUB, "10.0.0.1/8", "x/y", "a b", "", "127.1"):
        with pytest.raises(ValueError, match=r"host|network"):
            authority.trust.add_token(Role.AGENT, hosts=[host])
    with pytest.raises(ValueError, match="the role viewer serves nobody"):
        authority.trust.add_token(Role.VIEWER, hosts=["e1.example.org"])


async def connects(address: str, credentials: Credentials, *, of_relay: bool = False, deadline_s: float = 2.0) -> bool:
    """Whether a client of the weight hub takes the server at an address for it, or for a relay."""
    options = ChannelOptions(credentials=credentials)
    async with WeightSyncClient(address, options, of_relay=of_relay) as client:
        try:
            await client.wait_until_connected(deadline_s)
        except MeshError:
            return False
    return True


async def test_a_client_of_the_hub_takes_no_member_of_another_role_for_it(authority: Authority) -> None:
    """All roles at once: a client gives up only at its deadline."""
    caller = credentials_of(member(authority, Role.ROLLOUT, "caller"))

    async def taken(role: Role) -> tuple[bool, bool]:
        hosts = ["127.0.0.1", "localhost"] if role in SERVING else []
        async with serving(credentials_of(member(authority, role, "poses", hosts))) as address:
            as_hub, as_relay = await asyncio.gather(
                connects(address, caller, deadline_s=DEADLINE_S if role is Role.HUB else 2.0),
                connects(address, caller, of_relay=True, deadline_s=DEADLINE_S if role is Role.RELAY else 2.0),
            )
            return as_hub, as_relay

    found = dict(zip(Role, await asyncio.gather(*map(taken, Role)), strict=True))
    assert found == {role: (role is Role.HUB, role is Role.RELAY) for role in Role}


def test_a_client_that_verifies_hosts_alone_is_refused_where_members_could_have_the_hosts_name(
    authority: Authority, tmp_path: Path
) -> None:
    ours = member(authority, Role.ROLLOUT, "by-host")
    with pytest.raises(CredentialError, match=r"tls.names is 'hosts', and tls.ca .* is the authority of a run"):
        credentials_of(ours, by_host=True)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    credentials_of(CredentialFiles(ca=tmp_path / "ca.pem"), by_host=True)  # a proxy's


@asynccontextmanager
async def engine(files: CredentialFiles) -> AsyncIterator[str]:
    """An HTTPS server with a member's certificate; yields its URL."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    assert files.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/health"
    finally:
        await stop_serving(runner)


async def test_clients_of_engines_take_only_an_agent_that_is_not_revoked_for_one(authority: Authority) -> None:
    here = ["127.0.0.1"]
    context = client_context(member(authority, Role.ROLLOUT, "https").variables())

    async def answered(files: CredentialFiles) -> str:
        async with engine(files) as url, aiohttp.ClientSession() as session:
            try:
                async with session.get(url, ssl=context) as answer:
                    return await answer.text()
            except aiohttp.ClientConnectorError as error:
                return str(error)

    for role in (Role.ROLLOUT, Role.HUB, Role.RELAY, Role.PUBLISHER, Role.ORCHESTRATOR):
        assert f"that of {role}/as-engine, which is no engine" in await answered(
            member(authority, role, "as-engine", here)
        )
    good = member(authority, Role.AGENT, "engine", here)
    assert await answered(good) == "ok"
    authority.trust.revoke("agent/engine")
    assert "that of agent/engine, is revoked" in await answered(good)


async def test_the_same_token_and_name_with_another_key_is_refused(
    authority: Authority, entry: str, tmp_path: Path
) -> None:
    token = authority.trust.add_token(Role.AGENT)
    mine, theirs = request_for(tmp_path / "mine", "e"), request_for(tmp_path / "theirs", "e")
    await enroll(authority.fingerprint, entry, token, "Twice", mine)
    await enroll(authority.fingerprint, entry, token, "twice", mine)  # a host that asks again
    for name in ("twice", "TWICE", "Twice"):
        assert "is enrolled with another key" in str((await refusal(authority, entry, token, name, theirs)).details())
    other = authority.trust.add_token(Role.AGENT)
    assert "is taken by another token" in str((await refusal(authority, entry, other, "twice", theirs)).details())


async def test_a_revoked_token_lets_nobody_in_and_takes_back_all_that_it_enrolled(
    authority: Authority, entry: str, tmp_path: Path
) -> None:
    token, another = authority.trust.add_token(Role.AGENT), authority.trust.add_token(Role.ROLLOUT)
    folder = tmp_path / "e7"
    await join(folder, entry, token=token, ca_hash=authority.fingerprint, name="box-7")
    await enroll(authority.fingerprint, entry, another, "box-7", request_for(tmp_path / "w7", "box-7"))
    await enroll(authority.fingerprint, entry, another, "box-8", request_for(tmp_path / "w8", "box-8"))
    assert authority.trust.revoke(token) == [f"token {token.partition('.')[0]}", "agent/box-7", "rollout/box-7"]
    request = request_for(tmp_path / "late", "late")
    for name in ("late", "box-7"):
        refused = await refusal(authority, entry, token, name, request)
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "the join token is revoked" in str(refused.details())
    refused = await refusal(authority, entry, another, "box-7", request_for(tmp_path / "w7", "box-7"))
    assert "the name rollout/box-7 is revoked" in str(refused.details())
    with pytest.raises(MeshError, match="agent/box-7 is revoked"):
        await renew(folder, credentials_of(CredentialFiles.of_folder(folder)))
    unused = authority.trust.add_token(Role.ROLLOUT)
    assert authority.trust.revoke(unused.partition(".")[0]) == [f"token {unused.partition('.')[0]}"]
    assert "the join token is revoked" in str((await refusal(authority, entry, unused, "n", request)).details())


class Versions(weights_pb2_grpc.WeightSyncServicer):
    """Streams nothing, for ever."""

    async def WatchVersions(  # noqa: N802  # the contract's name
        self, request: weights_pb2.WatchVersionsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weights_pb2.WatchVersionsResponse]:
        yield weights_pb2.WatchVersionsResponse(revision=1)
        await asyncio.Event().wait()


def relay_with(credentials: Credentials) -> AbstractAsyncContextManager[str]:
    adder = weights_pb2_grpc.add_WeightSyncServicer_to_server
    return served("meshrl.v1.WeightSync", adder, Versions(), credentials=credentials)


async def test_calls_to_a_revoked_server_end_and_others_of_its_role_are_called_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    bad, caller = member(authority, Role.RELAY, "bad"), member(authority, Role.AGENT, "calls")
    options = ChannelOptions(credentials=credentials_of(caller), reconnect_s=0.0)
    identify(TlsConfig(), authority.folder.parent, Role.RELAY, "good")  # a program that keeps its certificate valid
    good = CredentialFiles.from_environ(os.environ)
    assert good.cert is not None
    async with (
        relay_with(credentials_of(bad)) as bad_address,
        relay_with(credentials_of(good)) as good_address,
        kept_valid(authority, Role.RELAY, "good"),
        WeightSyncClient(bad_address, options, of_relay=True) as to_bad,
        WeightSyncClient(good_address, options, of_relay=True) as to_good,
    ):
        await to_bad.wait_until_serving(DEADLINE_S)
        watching = asyncio.create_task(anext(to_bad.watch_versions(after_revision=1)))
        await asyncio.sleep(0.2)
        assert not watching.done()
        assert authority.trust.revoke("relay/bad") == ["relay/bad"]
        with pytest.raises(MeshError, match="a certificate of the role relay is revoked") as ended:
            await asyncio.wait_for(watching, DEADLINE_S)
        assert ended.value.reason is Reason.UNREACHABLE
        assert await to_bad.why_not_serving(2.0) != ""
        assert not await connects(bad_address, credentials_of(caller), of_relay=True)
        await to_good.wait_until_serving(DEADLINE_S)  # which has the new name within seconds
        assert names_in(good.cert) >= {"relay.meshrl", "relay-1.meshrl"}
        with pytest.raises(ValueError, match="relay/bad is revoked"):
            member(authority, Role.RELAY, "bad")


def test_a_certificate_has_the_latest_names_and_lacks_those_of_later_revocations(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "credentials", "main")
    for number in range(12):
        authority.trust.note_member(Role.ROLLOUT, f"gone-{number}", "x")
        authority.trust.revoke(f"rollout/gone-{number}")
    save_certificate(tmp_path / "new", authority.sign(request_for(tmp_path / "new", "w"), Role.ROLLOUT, "w"))
    cert = tmp_path / "new" / "cert.pem"
    assert names_in(cert) == {"rollout.meshrl", *(f"rollout-{number}.meshrl" for number in range(5, 13))}
    assert not names_lack(cert, authority.trust.read())
    revoked = authority.trust.read().revoked
    assert names_lack(cert, Trust({}, revoked | {("rollout", "w2")}))
    assert not names_lack(cert, Trust({}, revoked | {("agent", "w2")}))


def test_a_token_that_is_revoked_while_its_bearer_joins_lets_nobody_in(tmp_path: Path) -> None:
    trust = TrustFile(tmp_path / "trust.sqlite")
    trust.create()
    token = trust.add_token(Role.AGENT)
    with pytest.raises(ValueError, match="not bound to this token"):
        trust.enroll(token, "e1", "key", ["other.example.org"])
    trust.revoke(token)
    with pytest.raises(ValueError, match="the join token is revoked"):
        trust.enroll(token, "e1", "key", [])
    assert trust.revoke("agent/e1") == []
