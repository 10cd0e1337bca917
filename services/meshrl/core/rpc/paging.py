"""Pages of a list: `page_size` and `page_token` of a request, `next_page_token` of its answer."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from meshrl.wire.errors import FieldViolation, invalid

Entry = TypeVar("Entry")
SECRET = secrets.token_bytes(32)  # a token of an earlier start is of no use


class Paged(Protocol):
    page_size: int
    page_token: str


def page_of(request: Paged, entries: Sequence[Entry], key: Callable[[Entry], str]) -> tuple[Sequence[Entry], str]:
    """The page that a request asks for, and the token of the next one; empty on the last.

    A token stands for the `key` of the last entry before its page, and hides it. A page_size of 0 is all that is left.
    Raises INVALID_REQUEST for a token whose entry is gone.
    """
    first = 0
    if request.page_token:
        first = next((place for place, entry in enumerate(entries, 1) if _token(key(entry)) == request.page_token), -1)
        if first < 0:
            raise invalid([FieldViolation("page_token", "its entry is gone: list from the first page")], "the request")
    end = first + request.page_size if request.page_size else len(entries)
    page = entries[first:end]
    return page, _token(key(page[-1])) if page and end < len(entries) else ""


def _token(key: str) -> str:
    return hashlib.blake2b(key.encode(), key=SECRET, digest_size=16).hexdigest()
