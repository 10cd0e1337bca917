"""The keys of a configuration class, and what each accepts."""

from __future__ import annotations

import difflib
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo

Section = type[BaseModel]
Path = tuple[str, ...]
Table = dict[str, Any]
"""As a file or a command line gives it."""
ReadTable = Mapping[str, Any]

SECTION = "MESHRL_SECTION"
"""Set by rl: the program's name, which begins with the section of its keys, as in inference_2."""

LISTED_KEYS = 16
"""Most in a message."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one key accepts: a section, a list of `item`, a table of `value`, or else a plain value."""

    annotation: Any
    nullable: bool = False
    section: Section | None = None
    item: Kind | None = None
    value: Kind | None = None

    def step(self, part: str) -> tuple[str, Kind] | None:
        """The key or place named by `part` below this one, with its kind."""
        if self.section is not None:
            return _keys_of(self.section).get(part.replace("-", "_"))
        if self.item is not None:
            return (str(int(part)), self.item) if part.isdecimal() else None
        below = self if self.annotation is Any else self.value
        return None if below is None else (part, below)


def kind_of(annotation: Any) -> Kind:
    """Raises TypeError for a name that was defined below the class that uses it, which pydantic leaves unread."""
    if isinstance(annotation, (str, ForwardRef)):
        raise TypeError(f"{annotation!r} is read before it is defined; move its definition up")
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin in (Union, types.UnionType):
        kinds = [kind_of(member) for member in arguments if member is not types.NoneType]
        return replace(
            next((kind for kind in kinds if kind.section or kind.item or kind.value), kinds[0]),
            annotation=Union[tuple(kind.annotation for kind in kinds)],  # noqa: UP007 - made at run time
            nullable=len(kinds) < len(arguments) or any(kind.nullable for kind in kinds),
        )
    if origin in (list, tuple, set, frozenset, Sequence):
        return Kind(annotation=annotation, item=kind_of(arguments[0] if arguments else Any))
    if origin in (dict, Mapping):
        return Kind(annotation=annotation, value=kind_of(arguments[1] if arguments else Any))
    is_section = isinstance(origin, type) and issubclass(origin, BaseModel)
    return Kind(annotation=annotation, nullable=annotation is Any, section=origin if is_section else None)


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    alias = field.validation_alias
    others = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return (name, *(other for other in others if isinstance(other, str) and other != name))


@cache
def _keys_of(section: Section) -> Mapping[str, tuple[str, Kind]]:
    keys = {name: (name, kind_of(field.annotation)) for name, field in section.model_fields.items()}
    spelled = {other: keys[name] for name, field in section.model_fields.items() for other in spellings(name, field)}
    return spelled | keys


def every_key(section: Section, prefix: Path = ()) -> Iterator[Path]:
    """Paths of all keys below a section; `0` stands for any place in a list."""
    for name, field in section.model_fields.items():
        kind, path = kind_of(field.annotation), (*prefix, name)
        yield path
        if kind.item is not None:
            kind, path = kind.item, (*path, "0")
        if kind.section is not None:
            yield from every_key(kind.section, path)


def nearest(section: Section, key: str, prefix: Path = (), below: Path = ()) -> Path | None:
    """The key most like the unknown `key`, which was followed by `below`: `below` under a key like it, else `below`
    alone, as for --trainer.optim.lr of `trainer`, else a key like it beside or below."""
    close = _most_like(section, key.replace("-", "_"))
    if below:
        under = None if close is None else (*close, *below)
        found = next((path for path in (under, below) if path is not None and exists(section, path)), close)
    else:
        found = close
    return None if found is None else (*prefix, *found)


def _most_like(section: Section, wanted: str) -> Path | None:
    everywhere = {path[-1]: path for path in reversed(list(every_key(section)))}
    close = difflib.get_close_matches(wanted, section.model_fields, n=1, cutoff=0.6)
    if close and wanted not in everywhere:
        return (close[0],)
    close = difflib.get_close_matches(wanted, list(everywhere), n=1, cutoff=0.75)
    return everywhere[close[0]] if close else None


def exists(section: Section, path: Path) -> bool:
    kind = kind_of(section)
    for part in path:
        step = kind.step(part)
        if step is None:
            return False
        kind = step[1]
    return True


def suggestion(section: Section, path: Path, part: str, below: Path, write: Callable[[Path], str]) -> str:
    close = nearest(section, part, path, below)
    if close is not None:
        return f"; did you mean {write(close)}?"
    if len(section.model_fields) > LISTED_KEYS:
        return ""
    keys_of = f"keys of {'.'.join(path)}" if path else "top-level keys"
    return f"; {keys_of} are {', '.join(section.model_fields)}"


def flag_of(path: Path) -> str:
    return f"--{'.'.join(path)}".replace("_", "-")


def flag(key: str, *, off: bool = False, environ: Mapping[str, str] | None = None) -> str:
    """The flag to advise for a program's own key, such as `server.insecure`; in a program that rl started, rl's."""
    section = (os.environ if environ is None else environ).get(SECTION, "").partition("_")[0]
    name = flag_of(tuple(filter(None, (section, key)))).removeprefix("--")
    return f"--{'no-' if off else ''}{name}"


def describe(kind: Kind) -> str:
    if kind.section is not None:
        words = [each for each in get_args(kind.annotation) if get_origin(each) is Literal]
        text = " | ".join(["section", *map(_describe_plain, words)])
    elif kind.item is not None:
        text = f"list of {describe(kind.item)}"
    elif kind.value is not None:
        text = "table"
    else:
        text = _describe_plain(kind.annotation)
    return f"{text} or None" if kind.nullable and kind.annotation is not Any else text


def _describe_plain(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_describe_plain(member) for member in arguments)
    names: dict[object, str] = {
        str: "text", SecretStr: "text", bool: "true | false", Any: "any value", pathlib.Path: "path"
    }  # fmt: skip
    return names[annotation] if annotation in names else str(getattr(annotation, "__name__", "value"))
