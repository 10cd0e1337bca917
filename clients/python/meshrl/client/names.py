"""Names in certificates, of members, roles and hosts, in the spelling in which they are compared."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

MAX_HOSTS = 16
MEMBER_URI = "spiffe://meshrl/"
"""An authority's URI goes on with RUN, a member's with RUN/ROLE/NAME."""

RESERVED = "meshrl"
"""The domain of roles' names, closed to hosts and members."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def server_name(role: str, revoked: int = 0) -> str:
    """ROLE.meshrl: the DNS name of a role's servers on any host.

    Each of the role's `revoked` members changes it to one for which the authority signs no certificate of a revoked
    member.
    """
    return f"{role}-{revoked}.{RESERVED}" if revoked else f"{role}.{RESERVED}"


def check_name(name: str) -> str:
    """Raises ValueError for a name that no certificate can carry."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a member's name has 1 to 63 letters, digits, dots, hyphens or underscores, got {name!r}; give another"
        )
    return name


def member_name(name: str) -> str:
    """In lower case. Raises ValueError for one that names a role."""
    lower = check_name(name).lower()
    if lower.rstrip(".").endswith(f".{RESERVED}"):
        raise ValueError(f"a member's name must not end in .{RESERVED}, which names roles, got {name!r}; give another")
    return lower


def named_by_host() -> str:
    """What a member of this host is called that nobody named."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:63] or "host"


def canonical_host(host: str) -> str:
    """A DNS name or address as certificates carry it: lower case, no trailing dot, IDNA.

    Raises ValueError for wildcards, blanks, control characters, unusual notations of addresses, and the domain
    `meshrl`.
    """
    address = _address(host)
    if address is not None:
        return str(address)
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")
        labels = name.split(".")
        spelled = [label.encode("ascii").decode("idna").encode("idna").decode("ascii").lower() for label in labels]
    except UnicodeError as error:
        raise ValueError(f"{host!r} is no host's name: {error}; give a DNS name or an address") from error
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError(
            f"{host!r} is no host's name; give a DNS name without wildcard or blanks, or an address in its usual form"
        )
    if spelled != labels:
        raise ValueError(f"{host!r} is not spelled as its DNS name is; write {'.'.join(spelled)!r}")
    if labels[-1] == RESERVED:
        raise ValueError(f"a host's name must not end in .{RESERVED}, which names roles, got {host!r}; give its own")
    return name


def bound_host(host: str) -> str:
    """A host or a network such as 10.1.0.0/16. Raises ValueError."""
    if "/" not in host:
        return canonical_host(host)
    try:
        return str(ipaddress.ip_network(host))
    except ValueError as error:
        raise ValueError(f"{host!r} is no network: {error}; write it as 10.1.0.0/16") from error


def granted_hosts(bound: Iterable[str], asked: Sequence[str]) -> list[str]:
    """A certificate's hosts: those `asked` for, or all bound ones but networks. Raises ValueError for one that is not
    bound."""
    bound = list(bound)
    if not asked:
        return [host for host in bound if "/" not in host]
    networks = [ipaddress.ip_network(host) for host in bound if "/" in host]
    granted = list(dict.fromkeys(map(canonical_host, asked)))
    for host in granted:
        address = _address(host)
        if host not in bound and (address is None or not any(address in network for network in networks)):
            raise ValueError(
                f"the host {host!r} is not bound to this token, but {', '.join(bound) or 'none'}; make a token for it"
                f" with `meshrl token create --host {host}`"
            )
    if len(granted) > MAX_HOSTS:
        raise ValueError(f"a certificate has at most {MAX_HOSTS} hosts, got {len(granted)}; ask for fewer")
    return granted


def own_hosts() -> list[str]:
    hosts = ["localhost", "127.0.0.1", "::1"]
    try:
        return list(dict.fromkeys([*hosts, canonical_host(socket.gethostname())]))
    except ValueError:  # others call it by an address
        return hosts


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return None
        return address.ipv4_mapped or address
    return address
