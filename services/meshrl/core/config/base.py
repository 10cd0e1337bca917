"""The base class of every configuration section, and the error for a configuration that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class ConfigError(Exception):
    """A configuration cannot be used; the message says what was expected, what came and what to change."""


class BaseConfig(BaseModel):
    """A section of the configuration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )

    @classmethod
    def spread(cls, layer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one layer (a file, the command line, the environment) with shared keys copied to where they are used.

        A class that composes others overrides it; layers are merged afterwards, so precedence between layers holds.
        """
        return dict(layer)

    @classmethod
    def settle(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the merged layers ready for validation; a class that composes others overrides it."""
        return dict(values)
