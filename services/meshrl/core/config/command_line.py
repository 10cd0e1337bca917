"""Reads a command line: `@ file.toml`, `--section @ file.toml`, dotted kebab-case flags; no I/O.

That of pydantic-settings takes 0.45 to 1.1 s a start of `rl` (this one 0.09 s), stops at the first unknown flag, and
knows no places of lists, lists with spaces, `--no-section` or `None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import Kind, Path, describe, flag_of
from meshrl.core.config.spellings import Spellings, UnknownKeyError
from meshrl.core.config.values import decode


class _FileArgumentError(ConfigError):
    """An argument that was meant to be a file, or to name its section, is wrong."""


@dataclass(kw_only=True)
class CommandLine:
    """Files in order with the sections they fill, and one layer of values above them."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    layer: Layer = field(default_factory=Layer)
    help: Literal["", "everyday", "every key"] = ""
    dry_run: bool = False
    """Of a program without such a key: show the configuration and end."""

    problems: list[str] = field(default_factory=list)

    meant: list[Path] = field(default_factory=list)
    """Keys that unknown options may have meant."""

    lacks_files: bool = False
    """An @ was wrong, so a file may be missing in `files`."""


def parse_command_line(spellings: Spellings, argv: Sequence[str]) -> CommandLine:
    """A flag in another's spelling stays under it in the layer."""
    line, rest = CommandLine(), list(argv)
    while rest:
        try:
            _take(spellings, rest, line)
        except ConfigError as error:
            line.problems.append(str(error))
            line.lacks_files |= isinstance(error, _FileArgumentError)
            if isinstance(error, UnknownKeyError):
                line.meant.append(error.meant)
    return line


def _take(spellings: Spellings, rest: list[str], line: CommandLine) -> None:
    token = rest.pop(0)
    if token in ("--help", "-h"):
        line.help = line.help or "everyday"
    elif token == "--help-all":
        line.help = "every key"
    elif token == "--dry-run" and spellings.root.step("dry_run") is None:
        line.dry_run = True
    elif token == "@":
        line.files.append(((), _file_name("@", rest)))
    elif token.startswith("@"):
        raise _FileArgumentError(_missing_space(token))
    elif token.startswith("--") and len(token) > 2:
        _take_flag(spellings, token, rest, line)
    else:
        raise _FileArgumentError(
            f"unexpected argument {token!r}: values follow a flag (--key {token}) and files follow an @ (@ {token})"
        )


def _missing_space(token: str) -> str:
    return f"{token!r} needs a space between @ and the file: write '@ {token[1:]}'"


def _file_name(before: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--") or rest[0] == "@":
        came = f"got {rest[0]!r}" if rest else "the command line ends"
        raise _FileArgumentError(
            f"expected a TOML file after '{before}', but {came}; write '{before} path/to/file.toml'"
        )
    return rest.pop(0)


def _take_flag(spellings: Spellings, token: str, rest: list[str], line: CommandLine) -> None:
    flag, has_value, given = token.partition("=")
    following = "" if has_value or not rest else rest[0]
    if flag.endswith("@"):
        raise _FileArgumentError(f"{token!r} needs a space before @: write '{flag[:-1]} @ file.toml'")
    if following == "@":
        rest.pop(0)
        name = _file_name(f"{flag} @", rest)
        try:
            path, kind = _find(spellings, flag)
        except UnknownKeyError as unknown:
            raise _FileArgumentError(str(unknown)) from unknown
        if not kind.section:
            raise _FileArgumentError(
                f"{flag} @ {name}: only a section takes a file, {'.'.join(path)} is {describe(kind)}"
            )
        line.files.append((path, name))
        return
    if following.startswith("@"):
        raise _FileArgumentError(f"{flag} {_missing_space(rest.pop(0))} (or {flag}=... for a value that starts with @)")
    text = given if has_value else rest.pop(0) if rest and not following.startswith("--") else None
    try:
        path, kind = _find(spellings, flag)
    except UnknownKeyError:
        if not flag.startswith("--no-"):
            raise
        line.layer.put(*_switched_off(spellings, flag, text), flag)
        return
    if text is None:
        bare = kind.annotation is Any and spellings.meant(path) is not None  # such a key may have been a switch
        value = True if bare else _switched_on(flag, kind)
    else:
        value = decode(kind, text if has_value else ",".join([text, *_more(kind, text, rest)]), flag)
    line.layer.put(path, value, flag)


def _more(kind: Kind, first: str, rest: list[str]) -> list[str]:
    more: list[str] = []
    if kind.item is None or first.strip().startswith("["):
        return more
    while rest and not rest[0].startswith(("--", "@")):
        more.append(rest.pop(0))
    return more


def _switched_on(flag: str, kind: Kind) -> object:
    if kind.annotation is bool:
        return True
    if kind.section and kind.nullable:
        return {}
    if kind.section:
        example = f"{flag}.{next(iter(kind.section.model_fields)).replace('_', '-')}"
        raise ConfigError(f"{flag} is a section that is always on; set one of its keys, such as {example}")
    raise ConfigError(f"{flag} needs a value ({describe(kind)}): write '{flag} VALUE'")


def _switched_off(spellings: Spellings, flag: str, text: str | None) -> tuple[Path, bool | None]:
    path, kind = _find(spellings, flag, "--no-")
    if kind.annotation is not bool and not kind.nullable:
        raise ConfigError(
            f"{flag}: {'.'.join(path)} cannot be switched off, it is {describe(kind)}; give it a value instead"
        )
    if text is not None:
        raise ConfigError(f"{flag} takes no value, got {text!r}; leave the value out")
    return path, False if kind.annotation is bool else None


def _find(spellings: Spellings, flag: str, prefix: str = "--") -> tuple[Path, Kind]:
    try:
        return spellings.find(tuple(flag.removeprefix(prefix).replace("-", "_").split(".")))
    except UnknownKeyError as unknown:
        hint = unknown.hint(flag_of)
        unknown.args = (f"unknown option {flag}{hint.replace('_', '-') if unknown.kind.section else hint}",)
        raise
