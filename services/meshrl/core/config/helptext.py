"""The text of --help: every key with its type, default and meaning, read from the configuration class."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshrl.core.config.schema import Kind, Section, describe, field_kind, spellings

_WIDTH = 110
_INTRO = """\
usage: {prog} [@ file.toml]... [--section @ file.toml]... [--key value]...

{meaning}

  @ file.toml             take keys from a TOML file; later files win over earlier ones, key by key
  --section @ file.toml   the same for one section
  --key value             set one key; --key=value is the same
  --key, --no-key         switch a true/false key, or an optional section, on or off (key = true, false in a file)
  --key None              no value
  --list 1,2 --list.0.key value   a list, or one entry of it

The command line wins over files, files over PRIME_ variables (PRIME_SECTION__KEY), those over defaults.
"""


def help_text(section: Section, prog: str) -> str:
    """The whole help text, ending in a newline."""
    parts = [_INTRO.format(prog=prog, meaning=_meaning(section))]
    parts.extend(_section_text(section, (), None))
    return "\n".join(parts) + "\n"


def _meaning(section: Section) -> str:
    return " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())


def _section_text(section: Section, path: tuple[str, ...], default: BaseModel | None) -> Iterator[str]:
    """Lines of a section's own keys, then of the sections below it."""
    below: list[tuple[Section, tuple[str, ...], BaseModel | None, str]] = []
    for name, field in section.model_fields.items():
        kind = field_kind(field)
        here = (*path, name)
        value = _default(field, default, name)
        below.extend(_below(kind, here, value, field))
        if kind.sections and not kind.nullable and len(kind.sections) == 1:
            continue
        yield from _entry(here, kind, field, value)
    for child, child_path, child_default, title in below:
        yield ""
        yield title
        yield from _section_text(child, child_path, child_default)


def _below(
    kind: Kind, path: tuple[str, ...], value: Any, field: FieldInfo
) -> Iterator[tuple[Section, tuple[str, ...], BaseModel | None, str]]:
    holder, place = (kind, path) if kind.item is None else (kind.item, (*path, "N"))
    meaning = " ".join((field.description or "").split())
    for child in holder.sections:
        own = value if isinstance(value, child) else None
        which = f" ({child.__name__})" if len(holder.sections) > 1 else ""
        yield child, place, own, f"[{'.'.join(place)}]{which} {meaning}"


def _default(field: FieldInfo, default: BaseModel | None, name: str) -> Any:
    if default is not None:
        return getattr(default, name)
    return field.get_default(call_default_factory=True)


def _entry(path: tuple[str, ...], kind: Kind, field: FieldInfo, value: Any) -> Iterator[str]:
    flag = "--" + ".".join(path).replace("_", "-")
    default = "required" if value is PydanticUndefined else f"default: {_plain(value)}"
    others = spellings(path[-1], field)[1:]
    older = f"; also: {', '.join(other.replace('_', '-') for other in others)}" if others else ""
    yield f"  {flag} <{describe(kind)}{_bounds(field)}>  ({default}{older})"
    for paragraph in (field.description or "").split("\n\n"):
        yield from textwrap.wrap(" ".join(paragraph.split()), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "on"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | PurePath):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return str(value)


def _bounds(field: FieldInfo) -> str:
    texts = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=limit):
                texts.append(f">= {limit}")
            case Gt(gt=limit):
                texts.append(f"> {limit}")
            case Le(le=limit):
                texts.append(f"<= {limit}")
            case Lt(lt=limit):
                texts.append(f"< {limit}")
    return (", " + ", ".join(texts)) if texts else ""
