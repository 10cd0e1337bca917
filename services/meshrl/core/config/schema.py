"""What a configuration class accepts: its keys, their kinds and older spellings, read from the class itself."""

from __future__ import annotations

import difflib
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo

Section = type[BaseModel]
Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one key accepts: sections, a list, a mapping, or else a plain value.

    `sections` has several members where the key chooses between classes, by the key named `discriminator`.
    """

    annotation: Any
    nullable: bool = False
    sections: tuple[Section, ...] = ()
    discriminator: str | None = None
    item: Kind | None = None
    value: Kind | None = None

    @property
    def is_bool(self) -> bool:
        return self.annotation is bool

    @property
    def is_any(self) -> bool:
        return self.annotation is Any

    def section_for(self, data: Mapping[str, Any]) -> tuple[Section, ...]:
        """The classes that `data` may be: one when it names its type, else all."""
        if self.discriminator is None or self.discriminator not in data:
            return self.sections
        wanted = data[self.discriminator]
        chosen = tuple(section for section in self.sections if wanted in _literals(section, self.discriminator))
        return chosen or self.sections


def kind_of(annotation: Any, discriminator: str | None = None) -> Kind:
    """Reads an annotation; `Annotated` and `None` members are taken off."""
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                discriminator = extra.discriminator
        return kind_of(get_args(annotation)[0], discriminator)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _kind_of_union(annotation, discriminator)
    if isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        return Kind(annotation=annotation, sections=(annotation,))
    container = origin or annotation
    if container in (list, tuple, set, frozenset, Sequence):
        items = [arg for arg in get_args(annotation) if arg is not Ellipsis]
        return Kind(annotation=annotation, item=kind_of(items[0] if items else Any))
    if container in (dict, Mapping):
        arguments = get_args(annotation)
        return Kind(annotation=annotation, value=kind_of(arguments[1] if arguments else Any))
    return Kind(annotation=annotation, nullable=annotation is Any or annotation is types.NoneType)


def _kind_of_union(annotation: Any, discriminator: str | None) -> Kind:
    members = [member for member in get_args(annotation) if member is not types.NoneType]
    nullable = len(members) < len(get_args(annotation))
    kinds = [kind_of(member, discriminator) for member in members]
    sections = tuple(section for kind in kinds for section in kind.sections)
    first = kinds[0]
    chooser = discriminator or next((kind.discriminator for kind in kinds if kind.discriminator), None)
    return Kind(
        annotation=first.annotation if len(kinds) == 1 else Union[tuple(members)],  # noqa: UP007 - made at run time
        nullable=nullable or any(kind.nullable for kind in kinds),
        sections=sections,
        discriminator=chooser,
        item=next((kind.item for kind in kinds if kind.item), None),
        value=next((kind.value for kind in kinds if kind.value), None),
    )


def _literals(section: Section, key: str) -> tuple[Any, ...]:
    field = section.model_fields.get(key)
    if field is None:
        return ()
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else (field.default,)


def field_kind(field: FieldInfo) -> Kind:
    """The kind of a field of a configuration class."""
    discriminator = field.discriminator if isinstance(field.discriminator, str) else None
    return kind_of(field.annotation, discriminator)


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The field's name, then its older spellings."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        others = [choice for choice in alias.choices if isinstance(choice, str)]
    else:
        others = [alias] if isinstance(alias, str) else []
    return (name, *(other for other in others if other != name))


def find_field(sections: Sequence[Section], key: str) -> tuple[str, FieldInfo] | None:
    """The field that `key` names in one of the sections, with dashes for underscores and older spellings accepted."""
    wanted = key.replace("-", "_")
    for section in sections:
        for name, field in section.model_fields.items():
            if wanted in spellings(name, field):
                return name, field
    return None


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
        below = kind.item if kind.item is not None and kind.item.sections else kind
        for child in below.sections:
            yield from every_key(child, path if below is kind else (*path, "0"), depth - 1)


def nearest(sections: Sequence[Section], key: str, prefix: Path = ()) -> str | None:
    """The dotted path of the key most like the unknown `key`: among its siblings, else anywhere below them."""
    wanted = key.replace("-", "_")
    everywhere = {path[-1]: path for section in reversed(sections) for path in reversed(list(every_key(section)))}
    close = difflib.get_close_matches(wanted, key_names(sections), n=1, cutoff=0.6)
    if close and wanted not in everywhere:
        return ".".join((*prefix, close[0]))
    close = difflib.get_close_matches(wanted, list(everywhere), n=1, cutoff=0.75)
    return ".".join((*prefix, *everywhere[close[0]])) if close else None


def describe(kind: Kind) -> str:
    """A kind as a user writes it: `int`, `"a" | "b"`, `list of int`."""
    if kind.sections and kind.item is None:
        text = "section"
    elif kind.item is not None:
        text = f"list of {describe(kind.item)}"
    elif kind.value is not None:
        text = "table"
    else:
        text = _describe_plain(kind.annotation)
    return f"{text} or None" if kind.nullable and not kind.is_any else text


def _describe_plain(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(_describe_plain(member) for member in get_args(annotation))
    if origin is Annotated:
        return _describe_plain(get_args(annotation)[0])
    names: dict[Any, str] = {
        str: "text",
        SecretStr: "text",
        bool: "true | false",
        Any: "any value",
        pathlib.Path: "path",
    }
    return names[annotation] if annotation in names else str(getattr(annotation, "__name__", "value"))
