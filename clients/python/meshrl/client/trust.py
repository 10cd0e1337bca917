"""A run's trust file, `trust.sqlite`: hashes of its tokens, its members, and revocations.

`rl`, the `meshrl` command and the enrollment server write it. Servers check callers by it, clients check servers. A
token is ID.SECRET; the secret has 256 random bits, so its plain SHA-256 discloses nothing.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.client.names import MAX_HOSTS, bound_host, granted_hosts, member_name

_LAYOUT = 1
_TABLES = f"""
PRAGMA user_version = {_LAYOUT};
CREATE TABLE IF NOT EXISTS tokens (id TEXT PRIMARY KEY, hash TEXT NOT NULL, role TEXT NOT NULL, scope TEXT NOT NULL,
    expires_s REAL, revoked INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS members (role TEXT, name TEXT, token TEXT NOT NULL, key TEXT NOT NULL, hosts TEXT NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (role, name));
"""
EXPIRED = "has expired"


class Role(enum.StrEnum):
    """`meshrl.core.rpc.roles` lists what each role may call."""

    PUBLISHER = "publisher"
    """A trainer: publishes versions."""

    AGENT = "agent"
    """An engine: takes versions."""

    HUB = "hub"
    """Decides on versions and hands them out."""

    RELAY = "relay"
    """Takes versions from the hub for the engines of its site."""

    ROLLOUT = "rollout"
    """A rollout service or worker: plays environments."""

    ORCHESTRATOR = "orchestrator"
    """Drives the run."""

    OPERATOR = "operator"
    """A person or script, with all rights of the `meshrl` command."""

    VIEWER = "viewer"
    """Looks, and changes nothing."""

    TENANT = "tenant"
    """Makes, drives and ends runs of its own in a shared mesh, and no others."""


SERVING = frozenset(Role) - {Role.OPERATOR, Role.VIEWER, Role.TENANT}
"""Their certificates may name hosts."""


class TokenError(ValueError):
    """The message has the reason and the remedy."""


@dataclass(frozen=True)
class Scope:
    """A token's rights beside its role; kept as one JSON object."""

    hosts: tuple[str, ...] = ()
    """Hosts and networks, in canonical form, that a certificate may name."""

    runs: tuple[str, ...] = ()
    """Patterns, such as `team-a-*`, of the runs that its bearer and its members may name. Empty: all."""

    max_runs: int | None = None
    """At once in a trainer."""

    tokens_per_day: int | None = None
    """Most tokens of their batches in a day of UTC."""


@dataclass(frozen=True)
class KnownToken:
    """`expires_s` in seconds of the epoch, None for never."""

    id: str
    hash: str
    role: Role
    scope: Scope
    expires_s: float | None
    revoked: bool


@dataclass(frozen=True)
class Member:
    """The holder of a certificate, and its hosts."""

    role: Role
    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Trust:
    tokens: dict[str, KnownToken]
    revoked: frozenset[tuple[str, str]]
    """(role, name) of each."""

    came_by: Mapping[tuple[str, str], KnownToken] = field(default_factory=dict)
    """The token of each member, by (role, name)."""

    def num_revoked(self, role: str) -> int:
        """Decides the name of the role's servers."""
        return sum(each == role for each, _ in self.revoked)

    def why_not(self, id_: str, secret: str, now_s: float) -> str:
        record = self.tokens.get(id_)
        if record is None or not hmac.compare_digest(_hash(secret), record.hash):
            return "is none of this run"
        if record.revoked:
            return "is revoked"
        if record.expires_s is not None and record.expires_s <= now_s:
            return EXPIRED
        return ""


class TrustFile:
    """Every method raises OSError or sqlite3.Error for an unusable file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Makes a missing file, for its owner alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        with self._open(tables=True) as connection:
            connection.executescript(_TABLES)

    def read(self) -> Trust:
        with self._open() as connection:
            tokens = {row[0]: _token(row) for row in connection.execute(_TOKENS)}
            members = connection.execute("SELECT role, name, token, revoked FROM members").fetchall()
        return Trust(
            tokens=tokens,
            revoked=frozenset((role, name) for role, name, _, revoked in members if revoked),
            came_by={(role, name): tokens[token] for role, name, token, _ in members if token in tokens},
        )

    def add_token(
        self,
        role: Role,
        ttl_s: float | None = None,
        *,
        id_: str = "",
        hosts: Sequence[str] = (),
        runs: Sequence[str] = (),
        max_runs: int | None = None,
        tokens_per_day: int | None = None,
    ) -> str:
        """A new token, ID.SECRET, shown this once; an existing `id_` is replaced. `hosts` are names, addresses and
        networks in any form.

        Raises ValueError for bad hosts, hosts of a role that does not serve, and a tenant without runs.
        """
        if role is Role.TENANT and not runs:
            raise ValueError("a tenant has runs of its own; name them with --runs PATTERN, such as --runs 'team-a-*'")
        bound = tuple(dict.fromkeys(map(bound_host, hosts)))
        if bound and role not in SERVING:
            raise ValueError(f"the role {role} serves nobody, so its token has no hosts; leave --host out")
        if len(bound) > MAX_HOSTS:
            raise ValueError(f"a token has at most {MAX_HOSTS} hosts, got {len(bound)}; make several tokens")
        scope = Scope(hosts=bound, runs=tuple(runs), max_runs=max_runs, tokens_per_day=tokens_per_day)
        id_, secret = id_ or secrets.token_hex(5), secrets.token_urlsafe(32)
        expires_s = None if ttl_s is None else time.time() + ttl_s
        with self._open() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, 0)",
                (id_, _hash(secret), role.value, json.dumps(asdict(scope)), expires_s),
            )
        return f"{id_}.{secret}"

    def enroll(self, token: str, name: str, key: str, asked: Sequence[str]) -> Member:
        """Records a member that joins by a token; `asked` as in `granted_hosts`.

        Raises TokenError for the token, and ValueError for a name that is invalid, another's, revoked or enrolled with
        another key, and for hosts that the token lacks.
        """
        id_, _, secret = token.partition(".")
        name = member_name(name)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")  # a token that is revoked meanwhile lets nobody in
            found = connection.execute(f"{_TOKENS} WHERE id = ?", (id_,)).fetchone()
            trust = Trust({} if found is None else {id_: _token(found)}, frozenset())
            problem = trust.why_not(id_, secret, time.time())
            if problem:
                raise TokenError(f"the join token {problem}; make one with `meshrl token create --role ROLE`")
            record = trust.tokens[id_]
            member = Member(record.role, name, tuple(granted_hosts(record.scope.hosts, asked)))
            self._record(connection, member, id_, key, replaces=False)
        return member

    def note_member(self, role: Role, name: str, by: str, key: str = "", hosts: Sequence[str] = ()) -> Member:
        """Records a member that the authority's owner lets in, with `by` in place of a token and canonical `hosts`.
        Raises ValueError for a name that is invalid, another's or revoked."""
        member = Member(role, member_name(name), tuple(hosts) if role in SERVING else ())
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            self._record(connection, member, by, key, replaces=True)
        return member

    def renewed(self, role: Role, name: str, key: str) -> Member:
        """The member, from now on with this key. Raises ValueError for an unknown or revoked one."""
        with self._open() as connection:
            row = connection.execute(
                "UPDATE members SET key = ? WHERE role = ? AND name = ? AND NOT revoked RETURNING hosts",
                (key, role.value, name),
            ).fetchone()
        if row is None:
            raise ValueError(f"{role}/{name} is revoked or no member of this run; join with `meshrl join`")
        return Member(role, name, tuple(json.loads(row[0])))

    def revoke(self, what: str) -> list[str]:
        """Revokes a token (ID or ID.SECRET) or a member, ROLE/NAME; returns all that it revoked.

        A token takes its members along, and members of other roles with their names, which are the same host.
        """
        role, _, name = what.partition("/")
        with self._open() as connection:
            if name:
                where, values = "role = ? AND name = ?", [role, name.lower()]
                tokens = 0
            else:
                id_ = what.partition(".")[0]
                where, values = "name IN (SELECT name FROM members WHERE token = ?)", [id_]
                tokens = connection.execute("UPDATE tokens SET revoked = 1 WHERE id = ?", (id_,)).rowcount
            members = connection.execute(f"UPDATE members SET revoked = 1 WHERE {where} RETURNING role, name", values)
            revoked = sorted(f"{role}/{name}" for role, name in members)
        return [f"token {what.partition('.')[0]}"] * bool(tokens) + revoked

    def shut_out(self, members: Collection[tuple[str, str]]) -> None:
        """Records (role, name) of members that another of the run's files lists as revoked."""
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO members VALUES (?, ?, '', '', '[]', 1)", sorted(members))

    def _record(self, connection: sqlite3.Connection, member: Member, by: str, key: str, *, replaces: bool) -> None:
        who = f"the name {member.role}/{member.name}"
        row = connection.execute(
            "SELECT token, key, revoked FROM members WHERE role = ? AND name = ?", (member.role.value, member.name)
        ).fetchone()
        if row is not None and row[2]:
            raise ValueError(f"{who} is revoked; join under another with --name")
        if row is not None and row[0] != by:
            raise ValueError(f"{who} is taken by another token; join under another with --name")
        if row is not None and row[1] != key and not replaces:
            raise ValueError(
                f"{who} is enrolled with another key; join with the folder that holds it, or under another name with"
                " --name"
            )
        connection.execute(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, 0)",
            (member.role.value, member.name, by, key, json.dumps(member.hosts)),
        )

    @contextmanager
    def _open(self, *, tables: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection, whose work is one transaction."""
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=rw", uri=True, timeout=5.0)
        try:
            layout = connection.execute("PRAGMA user_version").fetchone()[0]
            empty = tables and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if layout != _LAYOUT and not empty:
                raise sqlite3.DatabaseError(
                    f"{self.path} has layout {layout}, not {_LAYOUT}; delete it, make tokens anew"
                )
            with connection:
                yield connection
        finally:
            connection.close()


_TOKENS = "SELECT id, hash, role, scope, expires_s, revoked FROM tokens"


def _token(row: tuple[str, str, str, str, float | None, int]) -> KnownToken:
    id_, hash_, role, scope, expires_s, revoked = row
    kept = json.loads(scope)
    scope_of = Scope(**{**kept, "hosts": tuple(kept["hosts"]), "runs": tuple(kept.get("runs", ()))})
    return KnownToken(id_, hash_, Role(role), scope_of, expires_s, bool(revoked))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
