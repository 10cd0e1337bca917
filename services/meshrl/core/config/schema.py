"""What a configuration class accepts at each key, read from the class itself."""

from __future__ import annotations

import difflib
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo

Section = type[BaseModel]
Path = tuple[str, ...]
Table = dict[str, Any]
"""Keys and values as a file or a command line gives them: text, numbers, lists and further tables."""
ReadTable = Mapping[str, Any]
"""A table that is only read."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one key accepts: sections, a list of `item`, a table of `value`, or else a plain value.

    `sections` has several members where the key chooses between classes, by the key named `discriminator`.
    """

    annotation: Any
    nullable: bool = False
    sections: tuple[Section, ...] = ()
    discriminator: str | None = None
    item: Kind | None = None
    value: Kind | None = None

    @property
    def is_any(self) -> bool:
        """True where every value goes."""
        return self.annotation is Any

    def step(self, part: str) -> tuple[str, Kind] | None:
        """The key or place that `part` names below this one and what it accepts; None when there is none."""
        if self.item is not None:
            return (str(int(part)), self.item) if part.isdecimal() else None
        if self.sections:
            key = part.replace("-", "_")
            found = (_keys_of(section).get(key) for section in self.sections)
            return next((named for named in found if named is not None), None)
        below = self if self.is_any else self.value
        return None if below is None else (part, below)

    def narrowed(self, data: Mapping[str, object]) -> Kind:
        """The same kind with only the class that `data` names by its discriminator, where it does."""
        if self.discriminator is None or self.discriminator not in data:
            return self
        wanted = data[self.discriminator]
        chosen = tuple(section for section in self.sections if wanted in _literals(section, self.discriminator))
        return replace(self, sections=chosen) if chosen else self


def kind_of(annotation: Any, discriminator: str | None = None) -> Kind:
    """Reads an annotation; `Annotated` and `None` members are taken off."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extras = (extra.discriminator for extra in arguments[1:] if isinstance(extra, FieldInfo))
        return kind_of(arguments[0], next((each for each in extras if isinstance(each, str)), discriminator))
    if origin in (Union, types.UnionType):
        return _kind_of_union(arguments, discriminator)
    if isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        return Kind(annotation=annotation, sections=(annotation,))
    container = origin or annotation
    if container in (list, tuple, set, frozenset, Sequence):
        return Kind(annotation=annotation, item=kind_of(arguments[0] if arguments else Any))
    if container in (dict, Mapping):
        return Kind(annotation=annotation, value=kind_of(arguments[1] if arguments else Any))
    return Kind(annotation=annotation, nullable=annotation is Any or annotation is types.NoneType)


def _kind_of_union(arguments: tuple[Any, ...], discriminator: str | None) -> Kind:
    members = [member for member in arguments if member is not types.NoneType]
    kinds = [kind_of(member, discriminator) for member in members]
    return Kind(
        annotation=kinds[0].annotation if len(kinds) == 1 else Union[tuple(members)],  # noqa: UP007 - made at run time
        nullable=len(members) < len(arguments) or any(kind.nullable for kind in kinds),
        sections=tuple(section for kind in kinds for section in kind.sections),
        discriminator=discriminator or next((kind.discriminator for kind in kinds if kind.discriminator), None),
        item=next((kind.item for kind in kinds if kind.item), None),
        value=next((kind.value for kind in kinds if kind.value), None),
    )


def _literals(section: Section, key: str) -> tuple[object, ...]:
    """The values of a section's discriminator that stand for this section."""
    field = section.model_fields.get(key)
    if field is None:
        return ()
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else (field.default,)


def field_kind(field: FieldInfo) -> Kind:
    """The kind of a field of a configuration class."""
    return kind_of(field.annotation, field.discriminator if isinstance(field.discriminator, str) else None)


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The field's name, then its older spellings."""
    alias = field.validation_alias
    others = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return (name, *(other for other in others if isinstance(other, str) and other != name))


@cache
def _keys_of(section: Section) -> Mapping[str, tuple[str, Kind]]:
    """Each key of a section and what it accepts, by its name and by every older spelling that is no name."""
    keys = {name: (name, field_kind(field)) for name, field in section.model_fields.items()}
    spelled = {other: keys[name] for name, field in section.model_fields.items() for other in spellings(name, field)}
    return spelled | keys


def kind_of_key(section: Section, name: str) -> Kind:
    """What a section accepts at one of its fields."""
    return _keys_of(section)[name][1]


def key_names(sections: Sequence[Section]) -> list[str]:
    """Every key of the sections, in the order of declaration, once."""
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


def every_key(section: Section, prefix: Path = (), depth: int = 8) -> Iterator[Path]:
    """Paths of all keys below a section; `0` stands for any place in a list."""
    if depth == 0:
        return
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path
        kind = field_kind(field)
        for child in kind.sections:
            yield from every_key(child, path, depth - 1)
        for child in kind.item.sections if kind.item is not None else ():
            yield from every_key(child, (*path, "0"), depth - 1)


def nearest(sections: Sequence[Section], key: str, prefix: Path = ()) -> Path | None:
    """The path of the key most like the unknown `key`: among its siblings, else anywhere below them."""
    wanted = key.replace("-", "_")
    everywhere = {path[-1]: path for section in reversed(sections) for path in reversed(list(every_key(section)))}
    close = difflib.get_close_matches(wanted, key_names(sections), n=1, cutoff=0.6)
    if close and wanted not in everywhere:
        return (*prefix, close[0])
    close = difflib.get_close_matches(wanted, list(everywhere), n=1, cutoff=0.75)
    return (*prefix, *everywhere[close[0]]) if close else None


def suggestion(kind: Kind, path: Path, part: str, write: Callable[[Path], str]) -> str:
    """What an unknown key `part` of the section at `path` may have been meant to be; `write` spells a key."""
    close = nearest(kind.sections, part, path)
    if close is not None:
        return f"; did you mean {write(close)}?"
    keys_of = f"keys of {'.'.join(path)}" if path else "top-level keys"
    return f"; {keys_of} are {', '.join(key_names(kind.sections))}"


def flag_of(path: Path) -> str:
    """A key as a flag: `--model.trust-remote-code`."""
    return f"--{'.'.join(path)}".replace("_", "-")


def describe(kind: Kind) -> str:
    """A kind as a user writes it: `int`, `"a" | "b"`, `list of int`."""
    if kind.sections:
        words = [each for each in get_args(kind.annotation) if get_origin(each) is Literal]
        text = " | ".join(["section", *map(_describe_plain, words)])
    elif kind.item is not None:
        text = f"list of {describe(kind.item)}"
    elif kind.value is not None:
        text = "table"
    else:
        text = _describe_plain(kind.annotation)
    return f"{text} or None" if kind.nullable and not kind.is_any else text


def _describe_plain(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_describe_plain(member) for member in arguments)
    if origin is Annotated:
        return _describe_plain(arguments[0])
    names: dict[object, str] = {
        str: "text", SecretStr: "text", bool: "true | false", Any: "any value", pathlib.Path: "path"
    }  # fmt: skip
    return names[annotation] if annotation in names else str(getattr(annotation, "__name__", "value"))
