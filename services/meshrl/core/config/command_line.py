"""Reads a command line: `@ file.toml`, `--section @ file.toml`, dotted kebab-case flags; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import Kind, Path, Section, describe, field_kind, find_field, key_names, nearest
from meshrl.core.config.values import assign, decode


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """A TOML file and the section it fills; () is the whole configuration."""

    section: Path
    name: str


@dataclass(kw_only=True)
class CommandLine:
    """Files in order, one layer of values above them, and the flag that each value came from."""

    files: list[FileRef] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    wants_help: bool = False


def parse_command_line(section: Section, argv: Sequence[str]) -> CommandLine:
    """Reads the arguments after the program's name. Raises ConfigError naming every argument that is wrong."""
    line = CommandLine()
    problems: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        try:
            _take(section, token, rest, line)
        except ConfigError as error:  # collected, so that one message names them all
            problems.append(str(error))
    if problems and not line.wants_help:
        raise ConfigError("\n".join(problems))
    return line


def _take(section: Section, token: str, rest: list[str], line: CommandLine) -> None:
    if token in ("--help", "-h"):
        line.wants_help = True
    elif token == "@":
        line.files.append(FileRef(section=(), name=_file_name("@", rest)))
    elif token.startswith("@"):
        raise ConfigError(_missing_space(token))
    elif token.startswith("--") and len(token) > 2:
        _take_flag(section, token, rest, line)
    else:
        raise ConfigError(
            f"unexpected argument {token!r}: values follow a flag (--key {token}) and files follow an @ (@ {token})"
        )


def _missing_space(token: str) -> str:
    return f"{token!r} needs a space between @ and the file: write '@ {token[1:]}'"


def _file_name(before: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--") or rest[0] == "@":
        came = f"got {rest[0]!r}" if rest else "the command line ends"
        raise ConfigError(f"expected a TOML file after '{before}', but {came}; write '{before} path/to/file.toml'")
    return rest.pop(0)


def _take_flag(section: Section, token: str, rest: list[str], line: CommandLine) -> None:
    flag, has_value, given = token.partition("=")
    if flag.endswith("@"):
        raise ConfigError(f"{token!r} needs a space before @: write '{flag[:-1]} @ file.toml'")
    value: str | None = given if has_value else None
    if not has_value and rest and rest[0] == "@":
        rest.pop(0)
        path, kind = _resolve(section, flag[2:])
        name = _file_name(f"{flag} @", rest)
        if not kind.sections or kind.item is not None:
            raise ConfigError(f"{flag} @ {name}: only a section takes a file, {'.'.join(path)} is {describe(kind)}")
        line.files.append(FileRef(section=path, name=name))
        return
    if not has_value and rest and rest[0].startswith("@") and len(rest[0]) > 1:
        raise ConfigError(f"{flag} {_missing_space(rest.pop(0))} (or {flag}=... for a value that starts with @)")
    if not has_value and rest and not rest[0].startswith("--"):
        value = rest.pop(0)
    path, decoded = _value_of(section, flag, value)
    assign(line.values, path, decoded)
    line.origins[path] = flag


def _value_of(section: Section, flag: str, text: str | None) -> tuple[Path, Any]:
    try:
        path, kind = _resolve(section, flag[2:])
    except ConfigError:
        if not flag.startswith("--no-"):
            raise
        return _switched_off(section, flag, text)
    if text is not None:
        try:
            return path, decode(kind, text)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from error
    if kind.is_bool:
        return path, True
    if kind.sections and kind.item is None and kind.nullable:
        return path, {}
    if kind.sections and kind.item is None:
        example = f"{flag}.{key_names(kind.sections)[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is a section that is always on; set one of its keys, such as {example}")
    raise ConfigError(f"{flag} needs a value ({describe(kind)}): write '{flag} VALUE'")


def _switched_off(section: Section, flag: str, text: str | None) -> tuple[Path, Any]:
    try:
        path, kind = _resolve(section, flag[len("--no-") :])
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if not kind.is_bool and not kind.nullable:
        raise ConfigError(
            f"{flag}: {'.'.join(path)} cannot be switched off, it is {describe(kind)}; give it a value instead"
        )
    if text is not None:
        raise ConfigError(f"{flag} takes no value, got {text!r}; leave the value out")
    return path, False if kind.is_bool else None


def _resolve(section: Section, dotted: str) -> tuple[Path, Kind]:
    """The path a dotted flag names and what it accepts. Raises ConfigError for an unknown key."""
    kind = Kind(annotation=section, sections=(section,))
    path: Path = ()
    for part in dotted.split("."):
        kind, name = _step(kind, part, path, dotted)
        path = (*path, name)
    return path, kind


def _step(kind: Kind, part: str, path: Path, dotted: str) -> tuple[Kind, str]:
    if kind.item is not None:
        if not part.isdecimal():
            place = ".".join((*path, "0")).replace("_", "-")
            raise ConfigError(
                f"unknown option --{dotted}: {'.'.join(path)} is a list, so a place comes next: --{place}.{part}"
            )
        return kind.item, str(int(part))
    if kind.sections:
        found = find_field(kind.sections, part)
        if found is not None:
            return field_kind(found[1]), found[0]
        raise ConfigError(f"unknown option --{dotted}{_suggestion(kind, part, path)}")
    if kind.value is not None:
        return kind.value, part.replace("-", "_")
    if kind.is_any:
        return kind, part.replace("-", "_")
    raise ConfigError(f"unknown option --{dotted}: {'.'.join(path)} is {describe(kind)} and has no keys below it")


def _suggestion(kind: Kind, part: str, path: Path) -> str:
    close = nearest(kind.sections, part, path)
    if close is not None:
        return f"; did you mean --{close.replace('_', '-')}?"
    known = ", ".join(name.replace("_", "-") for name in key_names(kind.sections))
    below = f"keys of {'.'.join(path)}" if path else "top-level keys"
    return f"; {below} are {known}"
