"""Loads a program's configuration: command line over files (left to right) over PRIME_ variables over defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from meshrl.core.config.base import BaseConfig, ConfigError
from meshrl.core.config.command_line import CommandLine, parse_command_line
from meshrl.core.config.files import read_environment, read_file
from meshrl.core.config.helptext import help_text
from meshrl.core.config.report import explain, one_message
from meshrl.core.config.sources import Layer, clean, merge
from meshrl.core.config.values import leaves

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
    environ = os.environ if environ is None else environ
    try:
        line = parse_command_line(cls, sys.argv[1:] if argv is None else argv)
        if line.wants_help:
            sys.stdout.write(help_text(cls, prog))
            raise SystemExit(0)
        config, warnings = build_config(cls, line, environ)
    except ConfigError as error:
        sys.stderr.write(one_message(prog, str(error)) + "\n")
        raise SystemExit(2) from None  # the message is all there is to say
    for warning in warnings:
        sys.stderr.write(f"{prog}: warning: {warning}\n")
    return config


def build_config(cls: type[Config], line: CommandLine, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The configuration and warnings about variables. Raises ConfigError, one line a problem."""
    environment = read_environment(cls, environ)
    layers = [Layer(values=environment.values, origin="the environment", origins=environment.origins)]
    layers += [Layer(values=read_file(ref), origin=ref.name, origins={}) for ref in line.files]
    layers.append(Layer(values=line.values, origin="the command line", origins=line.origins))
    layers = [clean(cls, layer) for layer in layers]
    values = merge(cls, layers)
    try:
        return cls.model_validate(values), environment.warnings
    except ValidationError as error:
        raise ConfigError(explain(cls, error, _origins(layers))) from error


def _origins(layers: Sequence[Layer]) -> dict[tuple[str, ...], str]:
    """Where each value came from; the last layer wins."""
    origins: dict[tuple[str, ...], str] = {}
    for layer in layers:
        for path, _ in leaves(layer.values):
            exact = next(
                (layer.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in layer.origins), ""
            )
            origins[path] = exact or layer.origin
    return origins
