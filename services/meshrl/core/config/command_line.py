"""Reads a command line: `@ file.toml`, `--section @ file.toml`, dotted kebab-case flags; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.respelling import OlderSpellings
from meshrl.core.config.schema import Kind, Path, describe, flag_of, key_names, nearest
from meshrl.core.config.values import decode


@dataclass(kw_only=True)
class CommandLine:
    """Files in order with the sections they fill, one layer of values above them, and which help is asked for."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    layer: Layer = field(default_factory=lambda: Layer(origin="the command line"))
    help: Literal["", "everyday", "every key"] = ""
    dry_run: bool = False
    """Of a program that has no such key: show what its configuration comes to, and end."""

    problems: list[str] = field(default_factory=list)
    """What is wrong with the arguments, one line each."""


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The keys that flags may name: those of the program, and those that it knows from elsewhere."""

    root: Kind
    older: OlderSpellings


def parse_command_line(root: Kind, argv: Sequence[str], older: OlderSpellings) -> CommandLine:
    """Reads the arguments after the program's name; arguments that are wrong are its `problems`.

    A flag in one of the `older` spellings is left under it in the layer.
    """
    line, keys, rest = CommandLine(), _Keys(root=root, older=older), list(argv)
    while rest:
        try:
            _take(keys, rest.pop(0), rest, line)
        except ConfigError as error:  # collected, so that one message names them all
            line.problems.append(str(error))
    return line


def _take(keys: _Keys, token: str, rest: list[str], line: CommandLine) -> None:
    """Reads one argument and what belongs to it."""
    if token in ("--help", "-h"):
        line.help = line.help or "everyday"
    elif token == "--help-all":
        line.help = "every key"
    elif token == "--dry-run" and keys.root.step("dry_run") is None:
        line.dry_run = True
    elif token == "@":
        line.files.append(((), _file_name("@", rest)))
    elif token.startswith("@"):
        raise ConfigError(_missing_space(token))
    elif token.startswith("--") and len(token) > 2:
        _take_flag(keys, token, rest, line)
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


def _take_flag(keys: _Keys, token: str, rest: list[str], line: CommandLine) -> None:
    flag, has_value, given = token.partition("=")
    following = "" if has_value or not rest else rest[0]
    if flag.endswith("@"):
        raise ConfigError(f"{token!r} needs a space before @: write '{flag[:-1]} @ file.toml'")
    if following == "@":
        rest.pop(0)
        path, kind = _resolve(keys, flag[2:])
        name = _file_name(f"{flag} @", rest)
        if not kind.sections:
            raise ConfigError(f"{flag} @ {name}: only a section takes a file, {'.'.join(path)} is {describe(kind)}")
        line.files.append((path, name))
        return
    if following.startswith("@"):
        raise ConfigError(f"{flag} {_missing_space(rest.pop(0))} (or {flag}=... for a value that starts with @)")
    text = given if has_value else rest.pop(0) if rest and not following.startswith("--") else None
    try:
        path, kind = _resolve(keys, flag[2:])
    except _UnknownKeyError:
        if not flag.startswith("--no-"):
            raise
        line.layer.put(*_switched_off(keys, flag, text), flag)
    else:
        texts = [] if text is None else [text, *([] if has_value else _more(kind, text, rest))]
        bare = kind.is_any and keys.older.is_older(path)  # such a key may have been a switch
        value = _decoded(flag, kind, texts) if texts else True if bare else _switched_on(flag, kind)
        line.layer.put(path, value, flag)


def _more(kind: Kind, first: str, rest: list[str]) -> list[str]:
    """The further values of a list that is written with spaces: `--gpu-ids 0 1 2`."""
    more: list[str] = []
    if kind.item is None or first.strip().startswith("["):
        return more
    while rest and not rest[0].startswith(("--", "@")):
        more.append(rest.pop(0))
    return more


def _decoded(flag: str, kind: Kind, texts: Sequence[str]) -> object:
    """The value of a flag; several texts are entries of one list."""
    try:
        values = [decode(kind, text) for text in texts]
        return values[0] if len(values) == 1 else [entry for each in values for entry in each or ()]
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


def _switched_off(keys: _Keys, flag: str, text: str | None) -> tuple[Path, bool | None]:
    """The key that `--no-key` means and what it becomes."""
    try:
        path, kind = _resolve(keys, flag.removeprefix("--no-"))
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


def _resolve(keys: _Keys, dotted: str) -> tuple[Path, Kind]:
    """The path that a dotted flag names and what it accepts. Raises _UnknownKeyError, saying what may be meant."""
    path: Path = ()
    written = tuple(part.replace("-", "_") for part in dotted.split("."))
    if keys.older.is_older(written) and (meant := keys.older.meant(written)) is not None:
        return written, meant
    kind = keys.root
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
