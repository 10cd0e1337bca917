"""How two programs of the mesh trust each other: one object opens every channel and adds every port.

The default is the MESHRL_TLS_ variables, else plain connections. A server with a certificate answers only callers with
a certificate of the same authority; without one, callers show a token.
"""

from __future__ import annotations

import os
import re
import sqlite3
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import grpc

from meshrl.client.names import MEMBER_URI, server_name
from meshrl.client.reloading import ReloadingChannel
from meshrl.client.trust import Trust, TrustFile

ChannelArguments = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]

PREFIX = "MESHRL_TLS_"
TOKEN_KEY = "authorization"
NAMES_VARIABLE = "MESHRL_TLS_NAMES"
TRUST_FILE = "trust.sqlite"


class CredentialError(ValueError):
    """The message names file and remedy."""


class Credentials(Protocol):
    @property
    def encrypted(self) -> bool:
        """Whether traffic is encrypted and authenticated."""

    def open_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.aio.Channel:
        """Connects with its first call. `server` is the role in the server's certificate; "" takes any name that fits
        the address."""

    def open_blocking_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.Channel:
        """For short use without an event loop: new certificates are not looked for."""

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """For a server that is not started. Returns the port. Raises RuntimeError as grpc does."""

    def metadata(self) -> Metadata:
        """Identifies the caller of each call."""


class InsecureCredentials:
    """For loopback and trusted networks."""

    encrypted = False

    def open_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=arguments)

    def open_blocking_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.Channel:
        return grpc.insecure_channel(address, options=arguments)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        return int(server.add_insecure_port(address))

    def metadata(self) -> Metadata:
        return ()


INSECURE = InsecureCredentials()


class TokenCredentials(InsecureCredentials):
    """Plain connections that show a token, ID.SECRET."""

    def __init__(self, token: str) -> None:
        self._metadata = bearer(token)

    def metadata(self) -> Metadata:
        return self._metadata


def bearer(token: str) -> Metadata:
    return ((TOKEN_KEY, f"Bearer {token}"),)


@dataclass(frozen=True, kw_only=True)
class CredentialFiles:
    """Those that are None are not used."""

    ca: Path | None = None
    """The authority that signs for peers, in PEM."""

    cert: Path | None = None
    """In PEM, followed by those up to the authority."""

    key: Path | None = None
    token: Path | None = None
    """ID.SECRET, shown to servers."""

    trust: Path | None = None
    """See `meshrl.client.trust`."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CredentialFiles:
        """MESHRL_TLS_CA, _CERT, _KEY, _TOKEN and _TRUST, else the contents of MESHRL_TLS_FOLDER."""
        folder = environ.get(f"{PREFIX}FOLDER")
        found = cls() if not folder else cls.of_folder(Path(folder))
        named = {each.name: environ.get(PREFIX + each.name.upper()) for each in fields(cls)}
        given = {name: Path(path) for name, path in named.items() if path}
        return cls(**{each.name: given.get(each.name, getattr(found, each.name)) for each in fields(cls)})

    @classmethod
    def of_folder(cls, folder: Path) -> CredentialFiles:
        places = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "token": "token", "trust": TRUST_FILE}
        return cls(**{name: folder / file for name, file in places.items() if (folder / file).exists()})

    def variables(self) -> dict[str, str]:
        paths = {each.name: getattr(self, each.name) for each in fields(self)}
        return {PREFIX + name.upper(): str(path) for name, path in paths.items() if path is not None}

    def check(self) -> None:
        """Raises CredentialError for files that are missing or do not match."""
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise CredentialError(
                f"tls.{given} is set without tls.{missing}; set both (or {PREFIX}{missing.upper()}), or neither"
            )
        for each in fields(self):
            path = getattr(self, each.name)
            if path is not None and not os.access(path, os.R_OK):
                raise CredentialError(
                    f"tls.{each.name} {str(path)!r} cannot be read; give the path of a file that is there and yours"
                )
        if self.token is not None and not re.fullmatch(rb"\s*[!-~]+\s*", self.token.read_bytes()):
            raise CredentialError(
                f"tls.token {str(self.token)!r} holds no token; write there ID.SECRET alone, as"
                " `meshrl token create` prints it"
            )
        if self.cert is not None and self.key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.cert, self.key)
            except (ssl.SSLError, OSError) as error:
                raise CredentialError(
                    f"tls.cert {str(self.cert)!r} and tls.key {str(self.key)!r} are no certificate with its key:"
                    f" {error}; give both in PEM"
                ) from error


def credentials_of(files: CredentialFiles, *, by_host: bool = False) -> Credentials:
    """`by_host`: certificates of another authority name the server's host, not its role. Raises CredentialError."""
    if files == CredentialFiles():
        return INSECURE
    files.check()
    if by_host and files.ca is not None and _is_of_a_run(files.ca):
        raise CredentialError(
            f"tls.names is 'hosts', and tls.ca {str(files.ca)!r} is the authority of a run, whose members may have the"
            " host's name without its role; leave tls.names out"
        )
    return FileCredentials(files, by_host=by_host)


def default_credentials() -> Credentials:
    """By this process's variables. Raises CredentialError."""
    by_host = os.environ.get(NAMES_VARIABLE) == "hosts"
    return credentials_of(CredentialFiles.from_environ(os.environ), by_host=by_host)


class FileCredentials:
    """A changed file is read again at the next handshake or call."""

    def __init__(self, files: CredentialFiles, *, by_host: bool = False, asks: bool = True) -> None:
        """`asks`: whether a server with these identifies callers; False lets members in."""
        self.files, self.asks = files, asks
        self._by_host = by_host
        learns = files.trust is not None and files.ca is not None and not by_host and _is_of_a_run(files.ca)
        self._revocations = Revocations(files.trust) if learns and files.trust is not None else None
        self._token = _Reread([files.token] if files.token is not None else [])

    @property
    def encrypted(self) -> bool:
        return self.files.cert is not None

    @property
    def mutual(self) -> bool:
        """Whether a server with these requires certificates of callers."""
        return self.files.cert is not None and self.files.ca is not None

    def metadata(self) -> Metadata:
        if self.files.token is None:
            return ()
        return bearer(self._token.read()[0].decode("ascii").strip())

    def open_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.aio.Channel:
        """TLS with a `ca`; a certificate is shown if there is one."""
        if self.files.ca is None:
            return grpc.aio.insecure_channel(address, options=arguments)
        reread, name = _Reread(self._shown()), self._name_of(server)

        def connect() -> grpc.aio.Channel:
            nonlocal name
            name = self._name_of(server)
            made = grpc.ssl_channel_credentials(*reread.read())
            return grpc.aio.secure_channel(address, made, options=[*arguments, *_expecting(name)])

        return ReloadingChannel(connect, reread.changed, distrusted=lambda: self._name_of(server) != name)

    def open_blocking_channel(self, address: str, arguments: ChannelArguments, server: str = "") -> grpc.Channel:
        if self.files.ca is None:
            return grpc.insecure_channel(address, options=arguments)
        made = grpc.ssl_channel_credentials(*(path.read_bytes() for path in self._shown()))
        return grpc.secure_channel(address, made, options=[*arguments, *_expecting(self._name_of(server))])

    def _shown(self) -> list[Path]:
        return [path for path in (self.files.ca, self.files.key, self.files.cert) if path is not None]

    def _name_of(self, server: str) -> str:
        """The present name in a certificate of this role; "" for the host's."""
        if not server or self._by_host:
            return ""
        return server_name(server, 0 if self._revocations is None else self._revocations.read().num_revoked(server))

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """A new certificate counts from the next handshake on; open streams go on."""
        if self.files.cert is None or self.files.key is None:
            return int(server.add_insecure_port(address))
        reread = _Reread([self.files.key, self.files.cert, *([self.files.ca] if self.files.ca else [])])

        def configuration() -> grpc.ServerCertificateConfiguration:
            key, cert, *authority = reread.read()
            return grpc.ssl_server_certificate_configuration([(key, cert)], *authority)

        def on_handshake() -> grpc.ServerCertificateConfiguration | None:
            try:
                return configuration() if reread.changed() else None
            except OSError:  # being replaced: the one before is still good
                return None

        made = grpc.dynamic_ssl_server_credentials(
            configuration(), on_handshake, require_client_authentication=self.mutual
        )
        return int(server.add_secure_port(address, made))


class Revocations:
    def __init__(self, path: Path) -> None:
        self._file, self._stamp = TrustFile(path), _Reread([path])
        self._trust = Trust(tokens={}, revoked=frozenset())

    def read(self) -> Trust:
        """The last state while the file cannot be read."""
        if self._stamp.changed():
            try:
                self._stamp.read()
                self._trust = self._file.read()
            except (OSError, sqlite3.Error):  # being made: the next call looks again
                self._stamp.forget()
        return self._trust


def _expecting(name: str) -> ChannelArguments:
    return [("grpc.ssl_target_name_override", name)] if name else []


def _is_of_a_run(ca: Path) -> bool:
    from cryptography import x509  # takes long to import, and few programs have certificates

    try:
        for certificate in x509.load_pem_x509_certificates(ca.read_bytes()):
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
            if any(uri.startswith(MEMBER_URI) for uri in uris):
                return True
    except (OSError, ValueError, x509.ExtensionNotFound):
        pass
    return False


class _Reread:
    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen: object = None
        self._contents: list[bytes] = []

    def changed(self) -> bool:
        """False while a file is missing."""
        try:
            return self._stamp() != self._seen
        except OSError:  # being replaced
            return False

    def read(self) -> list[bytes]:
        """Raises OSError."""
        if self._seen is None or self.changed():
            stamp = self._stamp()
            self._contents = [path.read_bytes() for path in self._paths]
            self._seen = stamp
        return self._contents

    def forget(self) -> None:
        self._seen = None

    def _stamp(self) -> object:
        return [(status.st_mtime_ns, status.st_ino, status.st_size) for status in map(os.stat, self._paths)]
