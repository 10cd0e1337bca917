"""TLS for an engine's HTTP server and its clients, made from the same credential files as gRPC's.

An engine is known by its certificate, a caller by the API key, as without TLS.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from loguru import logger

from meshrl.client.credentials import CredentialError, CredentialFiles
from meshrl.core.config.base import ConfigError

LOOK_S = 1.0
"""How often a server looks whether its certificate has been renewed."""


def scheme(environ: Mapping[str, str] = os.environ) -> str:
    """`https` where an engine of this process serves with a certificate, else `http`."""
    return "https" if CredentialFiles.from_environ(environ).cert is not None else "http"


def client_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """The context with which clients of this process verify engines: by the run's authority and those of the system.

    None where no authority is named: then those of the system alone count. Raises ConfigError for an unreadable one.
    """
    ca = CredentialFiles.from_environ(environ).ca
    if ca is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls.ca {str(ca)!r} cannot be read: {error}; give certificates in PEM") from error
    return context


def server_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """The context with which an engine serves; None for plain HTTP. Raises ConfigError for files that do not match."""
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
    """Loads renewed certificates into a server's context, for new connections; open ones go on."""
    files = CredentialFiles.from_environ(environ)
    if context is None or files.cert is None or files.key is None:
        yield
        return
    looking = asyncio.create_task(_look(context, files))
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


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
