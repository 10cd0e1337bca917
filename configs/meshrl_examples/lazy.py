"""Exports of an example that are imported once verifiers asks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module


def exports(package: str, names: Collection[str]) -> Callable[[str], object]:
    """The `__getattr__` of an example's package, which imports its `taskset` late: demonstrations do not need the
    seconds."""

    def find(name: str) -> object:
        if name in names:
            return getattr(import_module(f"{package}.taskset"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
