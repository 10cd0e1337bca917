"""Authenticates each call by certificate or token, and refuses those of other roles (`roles`)."""

from __future__ import annotations

import re
import sqlite3
import time
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import grpc
from cryptography import x509
from loguru import logger

from meshrl.client.credentials import TOKEN_KEY, CredentialError, Credentials, FileCredentials
from meshrl.client.trust import EXPIRED, Role, Scope, Trust, TrustFile
from meshrl.core.rpc.roles import ROLES_OF
from meshrl.wire.errors import MeshError, Reason

FRESH_S = 1.0
"""For how long a read of the trust file counts."""

UNKNOWN_FRESH_S = 0.2
_MEMBER = re.compile(r"spiffe://meshrl/(?P<run>[^/]+)/(?P<role>[^/]+)/(?P<name>[^/]+)")


ALL = Scope()


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A member by certificate, or the holder of a token. `expires_s` in seconds of the epoch. `account` and `scope` are
    the id and the scope of the token that it holds or joined by."""

    role: Role
    name: str
    expires_s: float | None = None
    token: tuple[str, str] | None = None
    account: str = ""
    scope: Scope = ALL

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
"""Of the call that is being served. None if everybody is let in."""


class Guard:
    """`trust`: tokens and revocations, None knows neither; `mutual`: certificates identify callers."""

    def __init__(self, trust: TrustFile | None, *, mutual: bool) -> None:
        self._file, self._mutual = trust, mutual
        self._trust = Trust(tokens={}, revoked=frozenset()) if trust is None else trust.read()
        self._read_at_s = time.monotonic()

    def admit(self, method: str, context: grpc.aio.ServicerContext) -> Caller:
        """The caller of `method` ("package.Service/Method"). Raises UNAUTHENTICATED and PERMISSION_DENIED."""
        caller = member(certificate_of(context)) if self._mutual else self._by_token(context)
        why = self.why_not(caller)
        if why is not None:
            raise why
        allowed = ROLES_OF.get(method, frozenset())
        if caller.role not in allowed:
            able = ", ".join(sorted(allowed)) or "nobody"
            raise MeshError(
                Reason.PERMISSION_DENIED,
                f"{caller} may not call {method}, which is for: {able}; call it with a credential of that role"
                " (meshrl token create --role ROLE)",
            )
        came_by = self._now(known=True).came_by.get((caller.role.value, caller.name))
        if caller.token is None and came_by is not None:
            caller = replace(caller, account=came_by.id, scope=came_by.scope)
        if caller.role is Role.TENANT and not caller.scope.runs:  # this server's trust file does not have its token
            raise MeshError(Reason.PERMISSION_DENIED, f"{caller} has no runs here; set tls.trust to the mesh's file")
        return caller

    def why_not(self, caller: Caller, *, standing: bool = False) -> MeshError | None:
        """Why a caller does not count. Only a revocation ends a `standing` call, whose caller may have renewed its
        credential meanwhile."""
        trust, now_s = self._now(known=True), time.time()
        if caller.token is not None:
            problem = trust.why_not(*caller.token, now_s)
            if problem == "is none of this run":
                problem = self._now(known=False).why_not(*caller.token, now_s)
            what, remedy = "the token", "get another with `meshrl token create`"
        else:
            problem = "is revoked" if (caller.role.value, caller.name) in trust.revoked else ""
            if not problem and caller.expires_s is not None and caller.expires_s <= now_s:
                problem = EXPIRED
            what, remedy = f"the certificate of {caller}", "get another with `meshrl join`"
        if not problem or (standing and problem == EXPIRED):
            return None
        return MeshError(Reason.UNAUTHENTICATED, f"{what} {problem}; {remedy}")

    def _now(self, *, known: bool) -> Trust:
        """The trust file, read again sooner for a token that it did not know."""
        age_s = time.monotonic() - self._read_at_s
        if self._file is not None and age_s > (FRESH_S if known else UNKNOWN_FRESH_S):
            try:
                self._trust = self._file.read()
            except (OSError, sqlite3.Error) as error:  # what it said last still counts
                logger.warning("{} cannot be read: {}", self._file.path, error)
            self._read_at_s = time.monotonic()
        return self._trust

    def _by_token(self, context: grpc.aio.ServicerContext) -> Caller:
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_KEY and isinstance(value, str):
                id_, _, secret = value.removeprefix("Bearer ").partition(".")
                record = self._now(known=True).tokens.get(id_) or self._now(known=False).tokens.get(id_)
                role = Role.VIEWER if record is None else record.role
                scope = ALL if record is None else record.scope
                return Caller(role=role, name=id_, token=(id_, secret), account=id_, scope=scope)
        raise MeshError(
            Reason.UNAUTHENTICATED,
            "this server wants a token in the metadata `authorization: Bearer ID.SECRET`; the programs of a run and"
            " `meshrl -o OUTPUT_DIR` find theirs in OUTPUT_DIR/credentials, others set tls.token or MESHRL_TLS_TOKEN",
        )


def certificate_of(context: grpc.aio.ServicerContext) -> bytes:
    """The caller's certificate in PEM. Raises UNAUTHENTICATED without one."""
    shown = context.auth_context().get("x509_pem_cert", ())
    if not shown:
        raise MeshError(
            Reason.UNAUTHENTICATED, "the caller showed no certificate; get one with `meshrl join`, set tls.folder"
        )
    return bytes(shown[0])


@lru_cache(maxsize=1024)
def member(pem: bytes) -> Caller:
    """Raises UNAUTHENTICATED for a certificate that names no member of a run."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    found = _MEMBER.fullmatch(uris[0]) if len(uris) == 1 else None
    if found is None or found["role"] not in set(Role):
        raise MeshError(
            Reason.UNAUTHENTICATED,
            f"the certificate names no member of a run (spiffe://meshrl/RUN/ROLE/NAME), but {uris or 'nothing'};"
            " get one with `meshrl join`",
        )
    return Caller(role=Role(found["role"]), name=found["name"], expires_s=certificate.not_valid_after_utc.timestamp())


def guard_of(credentials: Credentials) -> Guard | None:
    """None if the credentials know no callers. Raises CredentialError."""
    if not isinstance(credentials, FileCredentials) or not credentials.asks:
        return None
    files = credentials.files
    if files.trust is None and not credentials.mutual:
        if files.cert is not None:
            raise CredentialError(
                "tls.cert without tls.ca lets in whoever connects; set tls.ca, by which callers show certificates, or"
                " tls.trust, by which they show tokens"
            )
        return None
    try:
        return Guard(TrustFile(files.trust) if files.trust is not None else None, mutual=credentials.mutual)
    except (OSError, sqlite3.Error, ValueError) as error:
        raise CredentialError(f"tls.trust {str(files.trust)!r} cannot be read: {error}; name another") from error
