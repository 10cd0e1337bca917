"""Dataclasses as values for JSON come back as they went, by their annotations."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from meshrl.wire.types import Transport
from meshrl.wire.values import from_plain, to_plain


@dataclass(frozen=True, kw_only=True)
class Inner:
    digest: bytes
    shape: tuple[int, ...]
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    key: tuple[int, int]
    transport: Transport
    parts: tuple[Inner, ...]
    best: Inner | None
    seconds: float


WHOLE = Outer(
    key=(1, 7),
    transport=Transport.NCCL,
    parts=(Inner(digest=b"\x00\xff", shape=(2, 3)), Inner(digest=b"", shape=(), note="n")),
    best=Inner(digest=b"b", shape=(1,)),
    seconds=0.1,
)


@pytest.mark.parametrize(
    "value", [WHOLE, Outer(key=(0, 0), transport=Transport.STREAM, parts=(), best=None, seconds=2.0)]
)
def test_a_value_comes_back_through_json(value: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(value)))) == value


@pytest.mark.parametrize(
    "row", [[], [[1, 7], "carrier pigeon", [], None, 0.1], [[1, 7], "nccl", [["zz", [], None]], None, 0.1]]
)
def test_what_was_no_such_value_is_an_error(row: list[object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - Python's own words
        from_plain(Outer, row)
