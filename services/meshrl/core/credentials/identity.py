"""Finds a program's credentials, and renews its certificate; mains are wrapped by `as_member`.

Credentials are those of `tls.*` and the MESHRL_TLS_ variables, else a certificate that the program issues itself by the
run's authority in output_dir (`meshrl run init`), else none. Servers, clients and started processes find them in the
variables.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from cryptography import x509
from loguru import logger

from meshrl.client.authority import Authority, names_lack, renew_in_s, why_not_now
from meshrl.client.credentials import (
    NAMES_VARIABLE,
    PREFIX,
    CredentialFiles,
    Revocations,
    default_credentials,
)
from meshrl.client.enrollment import RENEWAL_FILE, renew, revoked_members
from meshrl.client.names import named_by_host, own_hosts
from meshrl.client.trust import SERVING, Role, TrustFile
from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import SECTION
from meshrl.core.config.shared import ServerConfig, TlsConfig
from meshrl.core.paths import Layout
from meshrl.core.program import ProgramConfig
from meshrl.core.waiting import beside
from meshrl.machine.ports import why_not_free
from meshrl.wire.errors import MeshError

if TYPE_CHECKING:  # takes long to import
    from meshrl.core.telemetry.tracing import Tracing

LOOK_S = 1.0
"""Between looks at revocations and at the certificate."""

RETRY_S = 30.0


def identify(tls: TlsConfig, output_dir: Path, role: Role, name: str, hosts: Sequence[str] = ()) -> Authority | None:
    """Chooses this process's credentials; returns the run's authority where it uses that.

    `hosts` are named in a server's certificate beside those of this host. Raises ConfigError for files that cannot be
    used.
    """
    given = tls.files()
    os.environ.update(given.variables())
    if tls.names == "hosts":
        os.environ[NAMES_VARIABLE] = "hosts"
    folder = Layout(output_dir).credentials
    try:
        if role is Role.ORCHESTRATOR and output_dir.name.startswith("run_") and not os.path.exists(folder):
            folder = Layout(output_dir.resolve().parent).credentials  # of a run in a mesh, whose folder is above
        named = any(os.environ.get(PREFIX + key) for key in ("FOLDER", "CA", "CERT", "KEY", "TOKEN", "TRUST"))
        if named or not os.path.exists(folder / "ca.key"):
            default_credentials()
            cert = CredentialFiles.from_environ(os.environ).cert
            if cert is not None and (why := why_not_now(x509.load_pem_x509_certificate(cert.read_bytes()))):
                raise ConfigError(f"the certificate {cert} {why}")
            return None
        authority = Authority(folder)
        member = (folder / f"{role}-{name}").resolve()
        authority.issue(member, role, name, hosts=_hosts(role, hosts))
        files = CredentialFiles.of_folder(member)
        trusted = CredentialFiles(ca=files.ca, cert=files.cert, key=files.key, trust=authority.trust.path.resolve())
        os.environ.update(trusted.variables())
    except ValueError as error:  # a CredentialError, an AuthorityError, or a name that is none
        raise ConfigError(str(error)) from error
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"the credentials in {folder} cannot be used: {error}; check its owner and mode") from error
    logger.info("{}/{} has a certificate of the run {}", role, name, authority.run)
    return authority


@asynccontextmanager
async def kept_valid(
    authority: Authority | None, role: Role, name: str, hosts: Sequence[str] = ()
) -> AsyncIterator[None]:
    files = CredentialFiles.from_environ(os.environ)
    if files.cert is None:
        yield
        return
    async with beside(_keep(files, authority, role, name, hosts)):
        yield


async def _keep(
    files: CredentialFiles, authority: Authority | None, role: Role, name: str, hosts: Sequence[str]
) -> None:
    assert files.cert is not None
    folder, credentials = files.cert.parent, default_credentials()
    joined = authority is None and await asyncio.to_thread((folder / RENEWAL_FILE).exists)
    if authority is None and not joined:  # somebody else's business
        return
    known: set[tuple[str, str]] = set()
    revocations = Revocations(files.trust) if files.trust is not None else None
    told = ""
    while True:
        wait_s = LOOK_S
        try:
            if joined and files.trust is not None:
                revoked = await revoked_members(folder, credentials)
                if revoked - known:
                    await asyncio.to_thread(TrustFile(files.trust).shut_out, revoked - known)
                known = revoked
            old = revocations is not None and names_lack(files.cert, revocations.read())
            if old or renew_in_s(files.cert) <= 0.0:
                if authority is None:
                    await renew(folder, credentials)
                else:
                    await asyncio.to_thread(authority.issue, folder, role, name, hosts=_hosts(role, hosts))
                logger.info("the certificate in {} is renewed", folder)
            told = ""
        except (MeshError, OSError, ValueError, sqlite3.Error) as error:  # what there is still counts for a while
            if told != str(error):
                told = str(error)
                logger.warning("the certificate in {} cannot be renewed or checked now: {}", folder, error)
            wait_s = RETRY_S if renew_in_s(files.cert) <= 0.0 else LOOK_S
        await asyncio.sleep(wait_s)


def _hosts(role: Role, more: Sequence[str]) -> list[str]:
    return [*own_hosts(), *more] if role in SERVING else []


class MemberConfig(ProgramConfig, Protocol):
    @property
    def tls(self) -> TlsConfig: ...

    @property
    def server(self) -> ServerConfig | None: ...


MemberT = TypeVar("MemberT", bound=MemberConfig)
_Serve = Callable[[MemberT, asyncio.Event, "Tracing"], Coroutine[None, None, int]]


def as_member(
    role: Role, serve: _Serve[MemberT], *, hosts: Callable[[MemberT], Sequence[str]] = lambda config: ()
) -> _Serve[MemberT]:
    """Wraps `serve` with credentials that are kept valid. `hosts` gives further names at which others call the
    program."""

    async def serve_as_member(config: MemberT, stop: asyncio.Event, tracing: Tracing) -> int:
        port = config.server.port if config.server is not None else 0
        if config.server is not None and port and SECTION not in os.environ:  # `rl` looks before it starts anything
            problem = why_not_free(config.server.host, port)
            if problem is not None:  # known before models and environments are loaded
                raise ConfigError(
                    f"cannot listen on {config.server.address}: {problem}; set another server.port, 0 for a free one,"
                    " or another server.host"
                )
        name = f"{named_by_host()[:40]}-{port or f'p{os.getpid()}'}"
        authority = identify(config.tls, config.output_dir, role, name, hosts(config))
        async with kept_valid(authority, role, name, hosts(config)):
            return await serve(config, stop, tracing)

    return serve_as_member
