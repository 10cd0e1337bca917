"""Checks requests against the schema's constraints (buf.validate, as `meshrl.v1.rules`); one error names every bad
field.

The services check what a message does not show, such as whether an environment exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from meshrl.v1 import weights_pb2
from meshrl.v1.rules import RULES
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import CONTRACT_VERSION

COLLECTIVE_BACKENDS = frozenset({"nccl", "gloo"})
_TRANSPORTS = {weights_pb2.TRANSPORT_FILESYSTEM, weights_pb2.TRANSPORT_STREAM, weights_pb2.TRANSPORT_NCCL}
_UUID = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_EXPRESSIONS: Mapping[str, Callable[[Any], bool]] = {
    "register.collective_backend": lambda it: it.collective_ranks == 0 or it.collective_backend in COLLECTIVE_BACKENDS,
    "register.transports": lambda transports: not _TRANSPORTS.isdisjoint(transports),
    "worker.environments": lambda environments: len({each.name for each in environments}) == len(environments),
}
"""Rules in CEL, by id."""

_PATTERNS: Mapping[str, str] = {
    "^[0-9a-f]{64}$": "must be 64 lower-case hexadecimal digits",
    "^https?://.*$": "must start with http:// or https://",
    r"^[^/\x00-\x1f\x7f-\x9f]{1,256}$": "must hold no slash or control character and have 1 to 256 characters",
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": "must have 1 to 63 letters, digits, dots, hyphens or underscores",
}
"""How to correct a mismatch."""


def check(message: Message) -> None:
    """Raises INVALID_REQUEST with every bad field, or CONTRACT_MISMATCH."""
    if found := violations(message):
        raise invalid(found, message.DESCRIPTOR.name)


def violations(message: Message) -> list[FieldViolation]:
    """In the schema's order. Raises CONTRACT_MISMATCH."""
    found: list[FieldViolation] = []
    plan = _plan(message.DESCRIPTOR)
    if plan is not None:
        plan.walk(message, "", found)
    return found


def validate_contract_version(peer: str) -> None:
    """Raises CONTRACT_MISMATCH for another major version; an empty one passes."""
    if peer and peer.split(".")[0] != CONTRACT_VERSION.split(".")[0]:
        raise MeshError(
            Reason.CONTRACT_MISMATCH,
            f"the peer speaks contract {peer}, this program {CONTRACT_VERSION}; run releases of the same major version",
            metadata={"contract_version": CONTRACT_VERSION},
        )


def at_least(peer: str, version: str) -> bool:
    """Whether a peer has stated this version or a later one."""
    stated = peer.split(".")
    return all(part.isdigit() for part in stated) and [*map(int, stated)] >= [*map(int, version.split("."))]


@dataclass(frozen=True, slots=True)
class _Test:
    holds: Callable[[Any], object]
    text: str
    shows_value: bool = True

    def describe(self, value: Any) -> str:
        if not self.shows_value:
            return self.text
        return f"{self.text}, got {value:g}" if isinstance(value, float) else f"{self.text}, got {value!r}"


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    has_presence: bool
    is_optional: bool
    """Zero stands for absent."""
    tests: tuple[_Test, ...]
    inner: Callable[[Any, str, list[FieldViolation]], None] | None
    """For its message, or each entry of a list."""


@dataclass(frozen=True, slots=True)
class _Plan:
    has_version: bool
    fields: tuple[_Field, ...]
    oneofs: tuple[tuple[str, str], ...]
    """With the text for an error; a member must be set."""
    whole: tuple[_Test, ...]

    def walk(self, message: Message, path: str, found: list[FieldViolation]) -> None:
        if self.has_version:
            validate_contract_version(message.contract_version)  # type: ignore[attr-defined]  # has_version
        for field in self.fields:
            if field.has_presence and not message.HasField(field.name):
                continue
            value = getattr(message, field.name)
            if field.is_optional and not value:
                continue
            for test in field.tests:
                if not test.holds(value):
                    found.append(FieldViolation(path + field.name, test.describe(value)))
                    break
            else:
                if field.inner is not None:
                    field.inner(value, path + field.name, found)
        for oneof, text in self.oneofs:
            if message.WhichOneof(oneof) is None:
                found.append(FieldViolation(path + oneof, text))
        for test in self.whole:
            if not test.holds(message):
                name, _, text = test.text.partition(": ")
                found.append(FieldViolation(path + name, text))


@cache
def _plan(descriptor: Descriptor) -> _Plan | None:
    rules = RULES.get(descriptor.full_name, {})
    plan = _Plan(
        has_version="contract_version" in descriptor.fields_by_name,
        fields=tuple(filter(None, (_field(field, rules.get(field.name, {})) for field in descriptor.fields))),
        oneofs=tuple(
            (oneof.name, f"set {' or '.join(field.name for field in oneof.fields)}")
            for oneof in descriptor.oneofs
            if rules.get(oneof.name, {}).get("required")
        ),
        whole=tuple(_tests(rules.get("", {}))),
    )
    return plan if plan.has_version or plan.oneofs or plan.fields or plan.whole else None


def _field(field: FieldDescriptor, rules: Mapping[str, Any]) -> _Field | None:
    made = _Field(
        name=field.name,
        has_presence=field.has_presence,
        is_optional=rules.get("ignore") == "IGNORE_IF_ZERO_VALUE",
        tests=tuple(_tests(rules)),
        inner=_inner(field, tuple(_tests(rules.get("items", {})))),
    )
    return made if made.tests or made.inner else None


def _inner(field: FieldDescriptor, tests: tuple[_Test, ...]) -> Callable[[Any, str, list[FieldViolation]], None] | None:
    plan = _plan(field.message_type) if field.message_type is not None else None
    if plan is not None and not field.is_repeated:
        return lambda value, path, found: plan.walk(value, f"{path}.", found)

    def each(values: Any, path: str, found: list[FieldViolation]) -> None:
        for place, value in enumerate(values):
            if plan is not None:
                plan.walk(value, f"{path}[{place}].", found)
            where = f"{path}[{place}]"
            found.extend(FieldViolation(where, test.describe(value)) for test in tests if not test.holds(value))

    return each if plan is not None or tests else None


def _tests(rules: Mapping[str, Any]) -> Iterator[_Test]:
    for make in dict.fromkeys(_KINDS[name] for name in rules if name not in ("ignore", "items")):
        yield from make(rules)


def _range(rules: Mapping[str, Any]) -> Iterator[_Test]:
    """NaN is in no range, infinity in none with a bound."""
    low, high = rules.get("gt", rules.get("gte", -math.inf)), rules.get("lt", rules.get("lte", math.inf))
    parts = []
    if -math.inf < low and high < math.inf:
        parts.append(f"in {'(' if 'gt' in rules else '['}{low:g}, {high:g}{')' if 'lt' in rules else ']'}")
    elif -math.inf < low:
        parts.append(f"{'above' if 'gt' in rules else 'at least'} {low:g}")
    elif high < math.inf:
        parts.append(f"{'below' if 'lt' in rules else 'at most'} {high:g}")
    if rules.get("finite"):
        parts.append("finite")

    open_low, open_high = "gt" in rules or low == -math.inf, "lt" in rules or high == math.inf
    holds: Mapping[tuple[bool, bool], Callable[[float], bool]] = {
        (False, False): lambda value: low <= value <= high,
        (False, True): lambda value: low <= value < high,
        (True, False): lambda value: low < value <= high,
        (True, True): lambda value: low < value < high,
    }
    yield _Test(holds[open_low, open_high], f"must be {' and '.join(parts)}")


def _length(rules: Mapping[str, Any]) -> Iterator[_Test]:
    low, high = rules.get("min_len", 0), rules.get("max_len", math.inf)
    text = "must not be empty" if high == math.inf else f"must have {low} to {high} characters"
    yield _Test(lambda value: low <= len(value) <= high, text, shows_value=False)


def _pattern(rules: Mapping[str, Any]) -> Iterator[_Test]:
    pattern = rules["pattern"]
    matches = re.compile(pattern.removeprefix("^").removesuffix("$")).fullmatch
    yield _Test(matches, _PATTERNS.get(pattern, f"must match {pattern}"))


def _items(rules: Mapping[str, Any]) -> Iterator[_Test]:
    low, high = rules.get("min_items", 0), rules.get("max_items", math.inf)
    text = f"at most {high} entries" if low == 0 else f"at least {low} entr{'y' if low == 1 else 'ies'}"
    yield _Test(lambda value: low <= len(value) <= high, f"must have {text}", shows_value=False)


def _words(rules: Mapping[str, Any]) -> Iterator[_Test]:
    *others, last = rules["in"]
    yield _Test(frozenset(rules["in"]).__contains__, f"must be {', '.join(others)} or {last}")


def _expressions(rules: Mapping[str, Any]) -> Iterator[_Test]:
    yield from (_Test(_EXPRESSIONS[rule["id"]], rule["message"], shows_value=False) for rule in rules["cel"])


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[_Test]]] = {
    "uuid": lambda rules: iter([_Test(_UUID.fullmatch, "must be a UUID")]),
    **dict.fromkeys(("gt", "gte", "lt", "lte", "finite"), _range),
    "min_len": _length,
    "max_len": _length,
    "pattern": _pattern,
    "min_items": _items,
    "max_items": _items,
    "in": _words,
    "cel": _expressions,
}
