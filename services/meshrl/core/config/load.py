"""Loads a program's configuration: command line over files (left to right) over PRIME_ variables over defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from meshrl.core.config.base import BaseConfig, ConfigError
from meshrl.core.config.command_line import CommandLine, parse_command_line
from meshrl.core.config.help_text import help_text
from meshrl.core.config.layers import merge_layers
from meshrl.core.config.report import explain, one_message
from meshrl.core.config.schema import Path, kind_of
from meshrl.core.config.sources import read_environment, read_file
from meshrl.core.config.values import merge

Config = TypeVar("Config", bound=BaseConfig)


def load_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration that the command line asks for; `argv` is without the program's name, None takes sys.argv.

    Ends the process: with code 0 after --help, with code 2 and one message on stderr when the configuration is wrong.
    """
    try:
        line = parse_command_line(kind_of(cls), sys.argv[1:] if argv is None else argv)
        if line.help:
            sys.stdout.write(help_text(cls, prog, every_key=line.help == "every key"))
            raise SystemExit(0)
        config, warnings = build_config(cls, line, os.environ if environ is None else environ)
    except ConfigError as error:
        help_flag = "--help-all" if cls.everyday_keys else "--help"
        sys.stderr.write(one_message(prog, str(error), help_flag) + "\n")
        raise SystemExit(2) from None  # the message is all there is to say
    for warning in warnings:
        sys.stderr.write(f"{prog}: warning: {warning}\n")
    return config


def build_config(cls: type[Config], line: CommandLine, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The configuration and warnings about variables. Raises ConfigError, one line a problem."""
    root = kind_of(cls)
    environment, warnings = read_environment(root, environ)
    layers = [environment, *(read_file(section, file) for section, file in line.files), line.layer]
    for layer in layers:
        layer.values = cls.hand_down(merge(root, {}, layer.values))

    def origin_of(path: Path) -> str | None:
        return next((origin for layer in reversed(layers) if (origin := layer.origin_of(path))), None)

    try:
        return cls.model_validate(cls.complete(merge_layers(root, layers))), warnings
    except ValidationError as error:
        raise ConfigError(explain(root, error, origin_of)) from error
