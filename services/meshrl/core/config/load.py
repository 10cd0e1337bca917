"""Loads a program's configuration: command line over files (left to right) over PRIME_ variables over defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from meshrl.core.config.base import BaseConfig, ConfigError
from meshrl.core.config.command_line import CommandLine, parse_command_line
from meshrl.core.config.dump import to_toml
from meshrl.core.config.help_text import help_text
from meshrl.core.config.layers import Layer, merge_layers
from meshrl.core.config.report import Origin, explain, one_message, without_unknown
from meshrl.core.config.respelling import OlderSpellings
from meshrl.core.config.schema import Kind, Path, Table, kind_of
from meshrl.core.config.sources import read_environment, read_file
from meshrl.core.config.values import merge

Config = TypeVar("Config", bound=BaseConfig)


def load_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
    instead: Callable[[Config, bool], str | None] | None = None,
) -> Config:
    """The configuration that the command line asks for; `argv` is without the program's name, None takes sys.argv.

    `instead` is what is done with it in place of running the program here, such as submitting it, given whether it is a
    dry run: it returns what to tell the user, and the process ends with code 0; None lets the program run.

    Ends the process: with code 0 after --help, with code 2 and one message on stderr when the configuration is wrong.
    """
    try:
        root = kind_of(cls)
        older = OlderSpellings(root, cls.sections_in_rl)
        line = parse_command_line(root, sys.argv[1:] if argv is None else argv, older)
        if line.help:
            sys.stdout.write(help_text(cls, prog, every_key=line.help == "every key"))
            raise SystemExit(0)
        config, warnings = build_config(cls, line, os.environ if environ is None else environ, older)
        told = None if instead is None else instead(config, line.dry_run)
    except ConfigError as error:
        help_flag = "--help-all" if cls.everyday_keys else "--help"
        sys.stderr.write(one_message(prog, str(error), help_flag) + "\n")
        raise SystemExit(2) from None  # the message is all there is to say
    for warning in warnings:
        sys.stderr.write(f"{prog}: warning: {warning}\n")
    if told is not None:
        sys.stderr.writelines(f"{prog}: note: {note}\n" for note in config.notes)
        sys.stdout.write(told)
        raise SystemExit(0)
    if line.dry_run:
        sys.stderr.writelines(f"{prog}: note: {note}\n" for note in config.notes)
        sys.stdout.write(to_toml(config))
        sys.stderr.write(f"{prog}: dry run: the configuration is valid, and is what was written\n")
        raise SystemExit(0)
    return config


def build_config(
    cls: type[Config], line: CommandLine, environ: Mapping[str, str], older: OlderSpellings
) -> tuple[Config, list[str]]:
    """The configuration and warnings about variables. Raises ConfigError with all that is wrong, one line a problem."""
    root, problems = kind_of(cls), list(line.problems)
    read, warnings = _layers(root, line, environ, older, problems)
    layers: list[Layer] = []
    notes: list[str] = []
    for layer in read:
        found = older.apply(layer)
        notes += found.notes
        problems += found.problems
        try:
            layer.values = cls.hand_down(merge(root, {}, layer.values))
        except ConfigError as error:
            problems.append(str(error))
        else:
            layers.append(layer)

    def origin_of(path: Path) -> str | None:
        return next((origin for layer in reversed(layers) if (origin := layer.origin_of(path))), None)

    try:
        merged = cls.complete(merge_layers(root, layers))
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, str(error)])) from error
    try:
        config = cls.model_validate(merged)
    except ValidationError as error:
        problems += explain(root, error, origin_of)
        problems += _beyond_unknown_keys(cls, merged, error, origin_of)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    config._notes = tuple(dict.fromkeys(notes))
    return config, warnings


def _layers(
    root: Kind, line: CommandLine, environ: Mapping[str, str], older: OlderSpellings, problems: list[str]
) -> tuple[list[Layer], list[str]]:
    """The layers, lowest first, and warnings about variables. What cannot be read is added to the problems."""
    layers: list[Layer] = []
    warnings: list[str] = []
    try:
        environment, warnings = read_environment(root, environ, older)
        layers.append(environment)
    except ConfigError as error:
        problems.append(str(error))
    for section, file in line.files:
        try:
            layers.append(read_file(section, file))
        except ConfigError as error:
            problems.append(str(error))
    return [*layers, line.layer], warnings


def _beyond_unknown_keys(cls: type[BaseConfig], values: Table, error: ValidationError, origin_of: Origin) -> list[str]:
    """What else is wrong once unknown keys are read as the keys that they are most like, or left out.

    A section with an unknown key is not looked at as a whole, so what does not fit together in it would be said only
    after the key is mended.
    """
    root = kind_of(cls)
    mended = without_unknown(root, values, error)
    if mended is None:
        return []
    try:
        cls.model_validate(mended)
    except ValidationError as rest:
        return explain(root, rest, origin_of, only=("value_error",))
    return []
