"""Reads a command line: `@ file.toml`, `--section @ file.toml`, dotted kebab-case flags; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import Kind, Path, describe, flag_of, key_names, nearest
from meshrl.core.config.values import decode


@dataclass(kw_only=True)
class CommandLine:
    """Files in order with the sections they fill, one layer of values above them, and which help is asked for."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    layer: Layer = field(default_factory=lambda: Layer(origin="the command line"))
    help: Literal["", "everyday", "every key"] = ""


def parse_command_line(root: Kind, argv: Sequence[str]) -> CommandLine:
    """Reads the arguments after the program's name. Raises ConfigError naming every argument that is wrong."""
    line = CommandLine()
    problems: list[str] = []
    rest = list(argv)
    while rest:
        try:
            _take(root, rest.pop(0), rest, line)
        except ConfigError as error:  # collected, so that one message names them all
            problems.append(str(error))
    if problems and not line.help:
        raise ConfigError("\n".join(problems))
    return line


def _take(root: Kind, token: str, rest: list[str], line: CommandLine) -> None:
    """Reads one argument and what belongs to it."""
    if token in ("--help", "-h"):
        line.help = line.help or "everyday"
    elif token == "--help-all":
        line.help = "every key"
    elif token == "@":
        line.files.append(((), _file_name("@", rest)))
    elif token.startswith("@"):
        raise ConfigError(_missing_space(token))
    elif token.startswith("--") and len(token) > 2:
        _take_flag(root, token, rest, line)
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


def _take_flag(root: Kind, token: str, rest: list[str], line: CommandLine) -> None:
    flag, has_value, given = token.partition("=")
    following = "" if has_value or not rest else rest[0]
    if flag.endswith("@"):
        raise ConfigError(f"{token!r} needs a space before @: write '{flag[:-1]} @ file.toml'")
    if following == "@":
        rest.pop(0)
        path, kind = _resolve(root, flag[2:])
        name = _file_name(f"{flag} @", rest)
        if not kind.sections:
            raise ConfigError(f"{flag} @ {name}: only a section takes a file, {'.'.join(path)} is {describe(kind)}")
        line.files.append((path, name))
        return
    if following.startswith("@"):
        raise ConfigError(f"{flag} {_missing_space(rest.pop(0))} (or {flag}=... for a value that starts with @)")
    text = given if has_value else rest.pop(0) if rest and not following.startswith("--") else None
    try:
        path, kind = _resolve(root, flag[2:])
        value = _switched_on(flag, kind) if text is None else _decoded(flag, kind, text)
    except _UnknownKeyError:
        if not flag.startswith("--no-"):
            raise
        path, value = _switched_off(root, flag, text)
    line.layer.put(path, value, flag)


def _decoded(flag: str, kind: Kind, text: str) -> object:
    try:
        return decode(kind, text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _switched_on(flag: str, kind: Kind) -> object:
    """What a flag without a value means."""
    if kind.annotation is bool:
        return True
    if kind.sections and kind.nullable:
        return {}
    if kind.sections:
        example = f"{flag}.{key_names(kind.sections)[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is a section that is always on; set one of its keys, such as {example}")
    raise ConfigError(f"{flag} needs a value ({describe(kind)}): write '{flag} VALUE'")


def _switched_off(root: Kind, flag: str, text: str | None) -> tuple[Path, bool | None]:
    """The key that `--no-key` means and what it becomes."""
    try:
        path, kind = _resolve(root, flag.removeprefix("--no-"))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if kind.annotation is not bool and not kind.nullable:
        raise ConfigError(
            f"{flag}: {'.'.join(path)} cannot be switched off, it is {describe(kind)}; give it a value instead"
        )
    if text is not None:
        raise ConfigError(f"{flag} takes no value, got {text!r}; leave the value out")
    return path, False if kind.annotation is bool else None


class _UnknownKeyError(ConfigError):
    """A flag names no key."""


def _resolve(kind: Kind, dotted: str) -> tuple[Path, Kind]:
    """The path that a dotted flag names and what it accepts. Raises _UnknownKeyError, saying what may be meant."""
    path: Path = ()
    for part in dotted.split("."):
        step = kind.step(part.replace("-", "_"))
        if step is None:
            raise _UnknownKeyError(f"unknown option --{dotted}{_hint(kind, part, path)}")
        path, kind = (*path, step[0]), step[1]
    return path, kind


def _hint(kind: Kind, part: str, path: Path) -> str:
    """How to go on below a key that has nothing named `part`."""
    name = ".".join(path)
    if kind.item is not None:
        return f": {name} is a list, so a place comes next: {flag_of((*path, '0'))}.{part}"
    if not kind.sections:
        return f": {name} is {describe(kind)} and has no keys below it"
    close = nearest(kind.sections, part, path)
    if close is not None:
        return f"; did you mean {flag_of(close)}?"
    known = ", ".join(key.replace("_", "-") for key in key_names(kind.sections))
    return f"; {f'keys of {name}' if path else 'top-level keys'} are {known}"
