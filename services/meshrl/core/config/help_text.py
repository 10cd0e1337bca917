"""The text of --help: keys with their type, default and meaning, read from the configuration class."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshrl.core.config.base import BaseConfig
from meshrl.core.config.schema import Path, Section, describe, flag_of, kind_of, spellings

_WIDTH = 110
_INTRO = """\
usage: {prog} [@ file.toml]... [--section @ file.toml]... [--key value]...

{meaning}

  @ file.toml             take keys from a TOML file; later files win over earlier ones, key by key
  --section @ file.toml   the same for one section
  --key value             set one key; --key=value is the same
  --key, --no-key         switch a true/false key, or an optional section, on or off (key = true, false in a file)
  --key None              no value
  --list 1,2 or 1 2; --list.0.key value   a list, or one entry of it

The command line wins over files, files over PRIME_ variables (PRIME_SECTION__KEY), those over defaults.
"""


def help_text(section: type[BaseConfig], prog: str, *, every_key: bool) -> str:
    meaning = " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())
    lines = [_INTRO.format(prog=prog, meaning=meaning)]
    entries = list(_entries(section, (), None))
    if every_key or not section.everyday_keys:
        lines += [text for _, text in entries]
    else:
        by_key = {".".join(path): text for path, text in entries}
        for title, keys in section.everyday_keys.items():
            lines += [f"{title}:", *(by_key[key] for key in keys), ""]
        lines.append(f"These are the everyday keys; '{prog} --help-all' shows every key.")
    return "\n".join(lines) + "\n"


def _entries(section: Section, path: Path, own: object) -> Iterator[tuple[Path, str]]:
    """Path and text of each key, then of the sections below, each with a title whose path is (). `own` is the section's
    default, which may set those of its keys."""
    below: list[tuple[str, Section, Path, object]] = []
    for name, field in section.model_fields.items():
        kind, here = kind_of(field.annotation), (*path, name)
        default = getattr(own, name) if isinstance(own, section) else field.get_default(call_default_factory=True)
        if kind.section is None or kind.nullable:
            shown = "required" if default is PydanticUndefined else f"default: {_plain(default)}"
            others = spellings(name, field)[1:]
            older = f"; also: {', '.join(other.replace('_', '-') for other in others)}" if others else ""
            lines = [f"  {flag_of(here)} <{describe(kind)}{_bounds(field)}>  ({shown}{older})"]
            for paragraph in (field.description or "").split("\n\n"):
                text, margin = " ".join(paragraph.split()), " " * 6
                lines += textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin)
            yield here, "\n".join(lines)
        holder, place = (kind, here) if kind.item is None else (kind.item, (*here, "N"))
        if holder.section is not None:
            meaning = " ".join((field.description or "").split())
            below.append((f"\n[{'.'.join(place)}] {meaning}", holder.section, place, default))
    for title, child, place, default in below:
        yield (), title
        yield from _entries(child, place, default)


def _plain(value: object) -> str:
    if isinstance(value, BaseModel):
        return "on"
    return "None" if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return "".join(
        f", {sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in signs.items()
        if hasattr(bound, name)
    )
