"""The text of --help: keys with their type, default and meaning, read from the configuration class."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshrl.core.config.base import BaseConfig
from meshrl.core.config.schema import Kind, Path, Section, describe, field_kind, flag_of, spellings

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


@dataclass(frozen=True, kw_only=True)
class _Key:
    """One key with its default, which the section that holds it may set."""

    path: Path
    field: FieldInfo
    default: object

    @property
    def kind(self) -> Kind:
        return field_kind(self.field)

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())


def help_text(section: type[BaseConfig], prog: str, *, every_key: bool) -> str:
    """The whole help text, ending in a newline: every key, or the everyday keys where the class names them."""
    meaning = " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())
    lines = [_INTRO.format(prog=prog, meaning=meaning)]
    if every_key or not section.everyday_keys:
        lines.extend(_section(section, (), None))
    else:
        for title, names in section.everyday_keys.items():
            lines += [f"{title}:", *(line for name in names for line in _entry(_find(section, name))), ""]
        lines.append(f"These are the everyday keys; '{prog} --help-all' shows every key.")
    return "\n".join(lines) + "\n"


def _keys(section: Section, path: Path, own: object) -> list[_Key]:
    """The keys of a section; `own` is the section as it is by default, where it is on."""
    return [
        _Key(
            path=(*path, name),
            field=field,
            default=getattr(own, name) if isinstance(own, section) else field.get_default(call_default_factory=True),
        )
        for name, field in section.model_fields.items()
    ]


def _below(key: _Key) -> list[tuple[Section, Path]]:
    """The classes of the sections below a key, with their paths; N stands for any place in a list."""
    kind, path = (key.kind, key.path) if key.kind.item is None else (key.kind.item, (*key.path, "N"))
    return [(section, path) for section in kind.sections]


def _find(section: Section, dotted: str) -> _Key:
    """A key by its dotted name, in the first of the sections that a key chooses between."""
    name, _, rest = dotted.partition(".")
    key = next(key for key in _keys(section, (), None) if key.path[-1] == name)
    for part in filter(None, rest.split(".")):
        child, path = _below(key)[0]
        key = next((each for each in _keys(child, path, key.default) if each.path[-1] == part), key)
    return key


def _section(section: Section, path: Path, own: object) -> Iterator[str]:
    """Lines of a section's own keys, then of the sections below it."""
    keys = _keys(section, path, own)
    for key in keys:
        if not key.kind.sections or key.kind.nullable or len(key.kind.sections) > 1:
            yield from _entry(key)
    for key in keys:
        children = _below(key)
        for child, child_path in children:
            which = f" ({child.__name__})" if len(children) > 1 else ""
            yield ""
            yield f"[{'.'.join(child_path)}]{which} {key.meaning}"
            yield from _section(child, child_path, key.default)


def _entry(key: _Key) -> Iterator[str]:
    default = "required" if key.default is PydanticUndefined else f"default: {_plain(key.default)}"
    others = spellings(key.path[-1], key.field)[1:]
    older = f"; also: {', '.join(other.replace('_', '-') for other in others)}" if others else ""
    yield f"  {flag_of(key.path)} <{describe(key.kind)}{_bounds(key.field)}>  ({default}{older})"
    for paragraph in (key.field.description or "").split("\n\n"):
        yield from textwrap.wrap(" ".join(paragraph.split()), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _plain(value: object) -> str:
    """A default as a user would write it."""
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
                texts.append(f", >= {limit}")
            case Gt(gt=limit):
                texts.append(f", > {limit}")
            case Le(le=limit):
                texts.append(f", <= {limit}")
            case Lt(lt=limit):
                texts.append(f", < {limit}")
    return "".join(texts)
