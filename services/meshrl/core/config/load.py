"""Loads a program's configuration: command line over files (left to right) over PRIME_ variables over defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from meshrl.core.config.base import BaseConfig, ConfigError, collected
from meshrl.core.config.command_line import CommandLine, parse_command_line
from meshrl.core.config.dump import to_toml
from meshrl.core.config.help_text import help_text
from meshrl.core.config.layers import Layer
from meshrl.core.config.report import explain, one_message
from meshrl.core.config.schema import kind_of
from meshrl.core.config.sources import TomlFile, Variables
from meshrl.core.config.spellings import Spellings, UnknownKeyError
from meshrl.core.config.values import as_table, in_present_words

Config = TypeVar("Config", bound=BaseConfig)


def load_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
    instead: Callable[[Config, bool], str | None] | None = None,
    spellings: Spellings | None = None,
) -> Config:
    """`argv` is without the program's name. `instead` gets the configuration and whether this is a dry run, and returns
    a message that ends the process with code 0, or None to let the program run. `spellings` are taken beside the
    configuration's own.

    Ends the process with code 0 after --help, with code 2 and one message on stderr when the configuration is wrong.
    """
    spellings = spellings or Spellings(kind_of(cls))
    try:
        line = parse_command_line(spellings, sys.argv[1:] if argv is None else argv)
        if line.help:
            sys.stdout.write(help_text(cls, prog, every_key=line.help == "every key"))
            raise SystemExit(0)
        config, warnings = build_config(cls, line, os.environ if environ is None else environ, spellings)
        told = None if instead is None else instead(config, line.dry_run)
    except ConfigError as error:
        help_flag = "--help-all" if cls.everyday_keys else "--help"
        sys.stderr.write(one_message(prog, str(error), help_flag) + "\n")
        raise SystemExit(2) from None  # the message is all there is to say
    sys.stderr.writelines(f"{prog}: warning: {warning}\n" for warning in warnings)
    if told is None and not line.dry_run:
        return config
    sys.stderr.writelines(f"{prog}: note: {note}\n" for note in config.notes)
    sys.stdout.write(to_toml(config) if told is None else told)
    if told is None:
        sys.stderr.write(f"{prog}: dry run: the configuration is valid, and is what was written\n")
    raise SystemExit(0)


def build_config(
    cls: type[Config], line: CommandLine, environ: Mapping[str, str], spellings: Spellings
) -> tuple[Config, list[str]]:
    """The configuration and warnings about variables. Raises ConfigError with all problems, one a line; values are not
    validated where a file could not be read."""
    problems, meant = list(line.problems), list(line.meant)
    notes: list[str] = []
    environment, warnings = Variables(environ).layer(spellings, problems)
    read = [environment]
    for section, file in line.files:
        with collected(problems):
            read.append(TomlFile(section, file).layer())
    layers: list[Layer] = []
    for layer in (*read, line.layer):
        said, wrong = spellings.apply(layer)
        present, unknown = in_present_words(spellings.root, layer)
        notes += said
        problems += [*wrong, *map(str, unknown)]
        meant += [each.meant for each in unknown if isinstance(each, UnknownKeyError)]
        layers.append(present)
    cls.hand_down(layers)
    whole = Layer()
    for layer in layers:
        whole.lay(layer.given)
    if len(read) <= len(line.files) or line.lacks_files:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    with collected(problems):
        values = cls.complete(as_table(spellings.root, whole.given))
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            missing = [path for path in meant if not whole.below(path)]
            problems += explain(spellings.root, error, whole.origin_of, missing)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    config._notes = tuple(dict.fromkeys(notes))
    config._origin_of = whole.origin_of
    return config, warnings
