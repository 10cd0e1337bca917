"""JSON without a schema, and dataclasses as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # the command line reads JSON, and needs no numpy for it
    from numpy.typing import NDArray

JsonObject: TypeAlias = Mapping[str, Any]
"""Readers check the fields that they use."""

Array: TypeAlias = "NDArray[Any]"

YOUNGER: Mapping[str, bool] = {"younger": True}
"""Of a dataclass's field that came after the first release."""


def to_plain(value: Any) -> Any:
    """A dataclass as the list of its fields, bytes in hexadecimal, an enumeration's value. Last YOUNGER fields with
    their defaults are left out."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        shown = list(fields(value))
        while shown and shown[-1].metadata == YOUNGER and getattr(value, shown[-1].name) == shown[-1].default:
            shown.pop()
        return [to_plain(getattr(value, field.name)) for field in shown]
    return value


def from_plain(annotation: Any, plain: Any) -> Any:
    """Reads `to_plain`'s value. Raises ValueError, TypeError."""
    return _reader(annotation)(plain)


@cache
def _reader(annotation: Any) -> Callable[[Any], Any]:
    if annotation is bytes:
        return bytes.fromhex
    if is_dataclass(annotation):
        kind: Any = annotation
        types = get_type_hints(kind)
        readers = [(field.name, _reader(types[field.name])) for field in fields(kind)]
        least = sum(field.metadata != YOUNGER for field in fields(kind))

        def read_row(row: list[Any]) -> Any:
            if not least <= len(row) <= len(readers):
                raise ValueError(f"{kind.__name__} has {len(readers)} fields, got {len(row)}")
            return kind(**{name: read(item) for (name, read), item in zip(readers, row, strict=False)})

        return read_row
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and len(arguments) == 2 and arguments[1] is ...:
        read_item = _reader(arguments[0])
        return lambda items: tuple(map(read_item, items))
    if get_origin(annotation) is tuple:
        return tuple
    if type(None) in arguments:
        read_some = _reader(arguments[0])
        return lambda item: None if item is None else read_some(item)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation
    return lambda item: item
