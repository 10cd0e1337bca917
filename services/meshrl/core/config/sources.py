"""Merges the layers of a configuration by pydantic-settings: one source a layer, the highest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from meshrl.core.config.base import BaseConfig
from meshrl.core.config.schema import Section, field_kind, find_field
from meshrl.core.config.values import canonical, give_way, place_lists


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Values from one place: a file, the environment, the command line."""

    values: dict[str, Any]
    origin: str
    """Name of the place for error messages."""

    origins: Mapping[tuple[str, ...], str]
    """More exact places of single values: a flag, a variable."""


class LayerSource(PydanticBaseSettingsSource):
    """A source of settings that holds one layer."""

    def __init__(self, settings: type[BaseSettings], section: Section, values: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._section = section
        self._values = values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One top-level value of the layer."""
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """The layer as it may stand under the layers above, which `current_state` holds."""
        return give_way((self._section,), self._values, self.current_state)


def clean(section: type[BaseConfig], layer: Layer) -> Layer:
    """The layer with present spellings and its shared keys spread. Raises ConfigError when spellings disagree."""
    spread = section.spread(canonical((section,), layer.values, ""))
    return Layer(values=spread, origin=layer.origin, origins=layer.origins)


def merge(section: type[BaseConfig], layers: Sequence[Layer]) -> dict[str, Any]:
    """Deep-merges clean layers, the last winning. Raises ConfigError when a list has gaps."""

    class Merged(BaseSettings):
        model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(LayerSource(settings_cls, section, layer.values) for layer in reversed(layers))

    merged = Merged()
    values = section.settle(place_lists((section,), merged.model_extra or {}))
    return fill_sections(section, values, None)


def fill_sections(section: Section, values: Mapping[str, Any], default: BaseModel | None) -> dict[str, Any]:
    """Completes sections that are given in part from the section's own default.

    The default of `server` may be port 50052: with only `server.host` given, that port must stay.
    """
    filled: dict[str, Any] = {}
    if default is not None:
        filled = {name: getattr(default, name) for name in default.model_fields_set if name not in values}
    for key, value in values.items():
        found = find_field((section,), key)
        filled[key] = value
        if found is None or not isinstance(value, Mapping):
            continue
        name, field = found
        kind = field_kind(field)
        if kind.item is not None or not kind.sections:
            continue
        own = getattr(default, name) if default is not None else field.get_default(call_default_factory=True)
        own = own if isinstance(own, BaseModel) else None
        chooser = kind.discriminator
        if chooser is not None and chooser not in value and own is not None:
            value = {chooser: getattr(own, chooser), **value}  # the key chooses its default class
        chosen = kind.section_for(value)
        if len(chosen) == 1:
            same = own if own is not None and type(own) is chosen[0] else None
            filled[key] = fill_sections(chosen[0], value, same)
    return filled
