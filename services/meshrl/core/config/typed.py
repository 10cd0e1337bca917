"""Finds keys that were changed but have no effect, such as those of another `type` of their section."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar

from meshrl.core.config.base import BaseConfig


def changed(config: BaseConfig, keys: Iterable[str]) -> list[str]:
    """Those of the keys that are not at their defaults."""
    fields = type(config).model_fields
    return [key for key in keys if getattr(config, key) != fields[key].get_default(call_default_factory=True)]


class TypedConfig(BaseConfig):
    section: ClassVar[str]

    of_types: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The types of each key that has no effect with others."""

    type: str

    def refuse_foreign(self, given: Container[str] | None = None) -> None:
        """Raises ValueError for a key of another type that is not at its default; only `given` ones are looked at."""
        own = [key for key, types in self.of_types.items() if self.type in types]
        for key in changed(self, [key for key in self.of_types if key not in own]):
            if given is not None and key not in given:
                continue
            owners, known = " or ".join(self.of_types[key]), f" (keys of {self.type}: {', '.join(own)})" if own else ""
            raise ValueError(
                f"{self.section}.{key} belongs to {self.section}.type {owners}, not to {self.type}; leave it out{known}"
            )
