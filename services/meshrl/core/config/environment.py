"""Reads PRIME_ variables into a layer of values; `__` separates levels: PRIME_MODEL__NAME is model.name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pydantic import ValidationError

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import Kind, Path, nearest
from meshrl.core.config.shared import LogConfig, LogLevel
from meshrl.core.config.values import decode

PREFIX = "PRIME_"
LOG_LEVEL = "PRIME_LOG_LEVEL"

OTHER_TOOLS = frozenset({"PRIME_API_KEY", LOG_LEVEL})
"""Variables of other tools whose names are keys here too; PRIME_API_KEY is an account's secret."""


def read_environment(root: Kind, environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """The layer that PRIME_ variables make, and warnings. Unknown names are other tools' and are left alone.

    A name that begins with a known section and then goes wrong is a warning, never an error.
    """
    layer, warnings = Layer(origin="the environment"), []
    level = environ.get(LOG_LEVEL)
    if level and root.step("log") is not None:
        try:
            LogConfig.model_validate({"level": level})
        except ValidationError:  # another tool's level: worth a word, not an error
            warnings.append(f"{LOG_LEVEL} is not used: {level!r} is none of {', '.join(get_args(LogLevel))}")
        else:
            layer.put(("log", "level"), level, LOG_LEVEL)
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in OTHER_TOOLS:
            warnings += _take(root, variable, text, layer)
    return layer, warnings


def _take(kind: Kind, variable: str, text: str, layer: Layer) -> list[str]:
    """Puts one variable into the layer; returns what there is to warn of."""
    path: Path = ()
    for part in variable.removeprefix(PREFIX).lower().split("__"):
        step = kind.step(part)
        if step is None:
            if not path:
                return []
            close = nearest(kind.sections, part, path) if kind.sections else None
            meant = f"; did you mean {PREFIX}{'__'.join(close).upper()}?" if close else ""
            return [f"{variable} is not used: {'.'.join(path)} has no key {part!r}{meant}"]
        path, kind = (*path, step[0]), step[1]
    try:
        layer.put(path, decode(kind, text), variable)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from error
    return []
