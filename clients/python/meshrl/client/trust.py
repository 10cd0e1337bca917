"""The trust file of a run: hashes of its tokens, the certificates that were issued, and what is revoked.

One SQLite file, `trust.sqlite`, which the run's `rl`, the `meshrl` command and the enrollment server write, and every
server that checks its callers reads. A token is ID.SECRET; the secret has 256 random bits, so that a plain SHA-256 of
it tells nobody anything.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, hash TEXT NOT NULL, role TEXT NOT NULL, expires_s REAL, revoked INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS members (role TEXT, name TEXT, token TEXT NOT NULL, revoked INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (role, name));
"""
EXPIRED = "has expired"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Role(enum.StrEnum):
    """The role of a member of a run; `meshrl.core.rpc.roles` says what each role may call."""

    PUBLISHER = "publisher"
    """A trainer: publishes versions."""

    AGENT = "agent"
    """An engine: takes versions."""

    RELAY = "relay"
    """A weight hub: takes versions and hands them on."""

    ROLLOUT = "rollout"
    """A rollout service or worker: plays environments."""

    ORCHESTRATOR = "orchestrator"
    """Drives the run."""

    OPERATOR = "operator"
    """A person, or a script, that may do what the `meshrl` command does."""

    VIEWER = "viewer"
    """Looks, and changes nothing."""


@dataclass(frozen=True)
class KnownToken:
    """What is kept of a token. `expires_s` in seconds of the epoch, None for never."""

    id: str
    hash: str
    role: Role
    expires_s: float | None
    revoked: bool


@dataclass(frozen=True)
class Trust:
    """What the file said when it was read."""

    tokens: dict[str, KnownToken]
    revoked: frozenset[tuple[str, str]]
    """(role, name) of each member whose certificates no longer count."""

    def why_not(self, id_: str, secret: str, now_s: float) -> str:
        """Why a token does not count; empty when it does."""
        record = self.tokens.get(id_)
        given = hashlib.sha256(secret.encode(errors="replace")).hexdigest()
        if record is None or not hmac.compare_digest(given, record.hash):
            return "is none of this run"
        if record.revoked:
            return "is revoked"
        if record.expires_s is not None and record.expires_s <= now_s:
            return EXPIRED
        return ""


def check_name(name: str) -> str:
    """The name of a member. Raises ValueError for one that no certificate can carry."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a member's name has 1 to 63 letters, digits, dots, hyphens or underscores, got {name!r}; give another"
        )
    return name


def write_private(path: Path, content: bytes) -> None:
    """Puts a file in place of what was there, whole, on disk, for its owner alone."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class TrustFile:
    """The file. Every method raises OSError or sqlite3.Error for one that cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Makes the file, for its owner alone, where it is not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._open() as connection:
            connection.executescript(_TABLES)

    def read(self) -> Trust:
        """What the file holds now."""
        with self._open() as connection:
            tokens = {
                row[0]: KnownToken(row[0], row[1], Role(row[2]), row[3], bool(row[4]))
                for row in connection.execute("SELECT id, hash, role, expires_s, revoked FROM tokens")
            }
            revoked = connection.execute("SELECT role, name FROM members WHERE revoked").fetchall()
        return Trust(tokens=tokens, revoked=frozenset(revoked))

    def add_token(self, role: Role, ttl_s: float | None = None, *, id_: str = "") -> str:
        """A new token of a role, ID.SECRET, which is told this once. An `id_` that is there is replaced."""
        id_, secret = id_ or secrets.token_hex(5), secrets.token_urlsafe(32)
        expires_s = None if ttl_s is None else time.time() + ttl_s
        with self._open() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, 0)",
                (id_, hashlib.sha256(secret.encode()).hexdigest(), role.value, expires_s),
            )
        return f"{id_}.{secret}"

    def note_member(self, role: Role, name: str, token: str) -> str:
        """Records who got a certificate by which token. Returns why not (the name is taken, or revoked), else empty."""
        with self._open() as connection:
            row = connection.execute(
                "SELECT token, revoked FROM members WHERE role = ? AND name = ?", (role.value, name)
            ).fetchone()
            if row is not None:
                return "is revoked" if row[1] else "" if row[0] == token else "is taken"
            connection.execute("INSERT INTO members VALUES (?, ?, ?, 0)", (role.value, name, token))
        return ""

    def revoke(self, what: str) -> list[str]:
        """Revokes a token by its id, with all members that came by it, or one member, ROLE/NAME.

        Returns what is revoked now: empty when there is no such token or member.
        """
        role, _, name = what.partition("/")
        with self._open() as connection:
            changed = connection.execute("UPDATE tokens SET revoked = 1 WHERE id = ?", (what,)).rowcount
            by = ("token = ?", (what,)) if not name else ("role = ? AND name = ?", (role, name))
            members = connection.execute(f"SELECT role, name FROM members WHERE {by[0]}", by[1]).fetchall()
            connection.execute(f"UPDATE members SET revoked = 1 WHERE {by[0]}", by[1])
        return [f"token {what}"] * bool(changed) + [f"{role}/{name}" for role, name in members]

    def shut_out(self, members: Collection[tuple[str, str]]) -> None:
        """Takes over what another file of the run says of revoked members, (role, name) each."""
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO members VALUES (?, ?, '', 1)", sorted(members))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=rw", uri=True, timeout=5.0)
        try:
            with connection:
                yield connection
        finally:
            connection.close()
