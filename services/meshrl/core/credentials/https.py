"""TLS for an engine's HTTP server and its clients, from the same credential files as gRPC's.

An engine is known by its certificate, of its host and its role in the run; a caller by the API key.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from loguru import logger

from meshrl.client.credentials import CredentialError, CredentialFiles, Revocations
from meshrl.client.names import MEMBER_URI
from meshrl.client.trust import Role
from meshrl.core.config.base import ConfigError
from meshrl.core.waiting import beside

LOOK_S = 1.0
"""Between looks at the server's certificate."""


def scheme(environ: Mapping[str, str] = os.environ) -> str:
    """Of an engine of this process."""
    return "https" if CredentialFiles.from_environ(environ).cert is not None else "http"


def client_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """Verifies engines by the run's authority and those of the system; a member of a run must be an agent that is not
    revoked. None without an authority. Raises ConfigError for an unreadable one."""
    files = CredentialFiles.from_environ(environ)
    if files.ca is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls.ca {str(files.ca)!r} cannot be read: {error}; give certificates in PEM") from error
    revocations = Revocations(files.trust) if files.trust is not None else None
    context.sslobject_class = _checked(ssl.SSLObject, revocations)
    context.sslsocket_class = _checked(ssl.SSLSocket, revocations)
    return context


_Tls = TypeVar("_Tls", ssl.SSLObject, ssl.SSLSocket)


def _checked(base: type[_Tls], revocations: Revocations | None) -> type[_Tls]:
    class Checked(base):  # type: ignore[misc, valid-type]  # one of two classes of ssl
        def do_handshake(self, *arguments: Any) -> None:
            super().do_handshake(*arguments)
            revoked = frozenset() if revocations is None else revocations.read().revoked
            _check_engine(self.getpeercert() or {}, revoked)

    return Checked


def _check_engine(shown: Mapping[str, Any], revoked: Collection[tuple[str, str]]) -> None:
    """Raises SSLCertVerificationError for a member of a run that is no engine, or revoked."""
    for kind, value in shown.get("subjectAltName", ()):
        member = value.removeprefix(MEMBER_URI)
        if kind != "URI" or member == value:
            continue
        _, role, name = [*member.split("/"), "", ""][:3]
        if role != Role.AGENT:
            raise ssl.SSLCertVerificationError(f"the server's certificate is that of {role}/{name}, which is no engine")
        if (role, name) in revoked:
            raise ssl.SSLCertVerificationError(f"the server's certificate, that of {role}/{name}, is revoked")


def server_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises ConfigError for files that do not match."""
    files = CredentialFiles.from_environ(environ)
    if files.cert is None or files.key is None:
        return None
    try:
        files.check()
    except CredentialError as error:
        raise ConfigError(str(error)) from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    return context


@asynccontextmanager
async def kept_fresh(context: ssl.SSLContext | None, environ: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Loads renewed certificates for new connections; open ones go on."""
    files = CredentialFiles.from_environ(environ)
    if context is None or files.cert is None or files.key is None:
        yield
        return
    async with beside(_look(context, files)):
        yield


async def _look(context: ssl.SSLContext, files: CredentialFiles) -> None:
    assert files.cert is not None
    seen = os.stat(files.cert)
    while True:
        await asyncio.sleep(LOOK_S)
        with suppress(FileNotFoundError):  # being replaced
            now = os.stat(files.cert)
            if (now.st_mtime_ns, now.st_ino) == (seen.st_mtime_ns, seen.st_ino):
                continue
            try:
                context.load_cert_chain(files.cert, files.key)
            except (OSError, ssl.SSLError) as error:  # the one before serves on
                logger.warning("the new certificate {} is not used: {}", files.cert, error)
            seen = now
