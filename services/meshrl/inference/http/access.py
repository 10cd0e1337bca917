"""Decides who may call which HTTP route.

Admin routes change an engine, so a web page must not reach them through its reader's browser. Such a request carries
the page's Origin, or, after DNS rebinding, a foreign Host. Browsers send JSON to another origin only with permission,
which this server never gives.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass

from aiohttp import web
from yarl import URL

from meshrl.core.rpc.serve import is_loopback
from meshrl.inference.http.admin_routes import ADMIN_PATHS

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/ping"})
PAGE_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Types that browsers send to another origin without asking it first."""


@dataclass(frozen=True, kw_only=True)
class HttpRefusal:
    status: int
    message: str


class Access:
    """With an API key everything but OPEN_PATHS needs it; without one, admin routes need the admin key, and without
    that a caller on this host."""

    def __init__(self, api_key: str | None, admin_key: str | None = None) -> None:
        self._api_key, self._key_for_admin = api_key, api_key or admin_key
        self._own_names = frozenset({"localhost", socket.gethostname().lower()})

    def refusal(self, request: web.Request) -> HttpRefusal | None:
        if request.path in OPEN_PATHS:
            return None
        if request.path in ADMIN_PATHS:
            return self._foreign_page(request) or self._stranger(request) or _not_json(request)
        return None if self._api_key is None else self._wrong_key(request, self._api_key)

    def _wrong_key(self, request: web.Request, api_key: str) -> HttpRefusal | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(errors="surrogateescape"), api_key.encode()):
            return None
        message = (
            "the Authorization header must carry this server's API key as a bearer token; that of an engine of rl is in"
            " OUTPUT_DIR/credentials/engine.key"
        )
        return HttpRefusal(status=401, message=message)

    def _stranger(self, request: web.Request) -> HttpRefusal | None:
        if self._key_for_admin is not None:
            return self._wrong_key(request, self._key_for_admin)
        if not is_loopback((request.remote or "").split("%")[0]):
            text = "call it from the engine's own host, or start the engine with an API key and send that"
            return HttpRefusal(status=403, message=f"{request.path} is an admin route: {text}")
        host = request.headers.get("Host")
        if host is None or self._is_own(host):
            return None
        text = "call it by this host's address or name, or start the engine with an API key and send that"
        return HttpRefusal(
            status=403, message=f"{request.path} is an admin route, and {host!r} is not this host: {text}"
        )

    def _foreign_page(self, request: web.Request) -> HttpRefusal | None:
        origin = request.headers.get("Origin")
        if origin is None or origin.removeprefix(f"{request.scheme}://") == request.headers.get("Host"):
            return None
        text = f"{request.path} is an admin route and not for web pages of {origin!r}; call it without an Origin"
        return HttpRefusal(status=403, message=text)

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this machine, as an address does: it cannot be made to point elsewhere."""
        try:
            name = (URL(f"http://{host}").host or "").lower()
            if name not in self._own_names and not name.endswith(".localhost"):
                ipaddress.ip_address(name)
        except ValueError:  # another name, or nothing that a name or address looks like
            return False
        return True


def _not_json(request: web.Request) -> HttpRefusal | None:
    """Bodies must be declared as JSON; without a body, only types that a page may send without asking are refused."""
    if request.method != "POST" or request.content_type == "application/json":
        return None
    if not request.can_read_body and request.content_type not in PAGE_TYPES:
        return None
    text = f"{request.path} takes JSON, got {request.content_type}; send it with Content-Type: application/json"
    return HttpRefusal(status=415, message=text)
