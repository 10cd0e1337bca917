"""Imports a user's own function by its path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping


def load_function(
    import_path: str, kwargs: Mapping[str, object], *, key: str, positional: tuple[str, ...]
) -> Callable[..., object]:
    """Imports `package.module.function` (or `package.module:function`). `key`, the section, and `positional`, the
    arguments ahead of `kwargs`, are for errors. Raises ValueError, with the remedy, when it is not there or cannot be
    called so."""
    module_name, _, name = import_path.replace(":", ".").rpartition(".")
    where = f"{key}.import_path {import_path!r}"
    if not module_name or not name:
        raise ValueError(f"{where}: expected package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: cannot import {module_name!r} ({error}); install the package that holds it, or put its folder "
            "on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{where}: {module_name!r} has no function {name!r}; name one that it defines")
    arguments = [*positional, *(f"{keyword}=..." for keyword in kwargs)]
    try:
        inspect.signature(function).bind(*positional, **kwargs)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that tells no signature
        raise ValueError(
            f"{where}: it cannot be called as {name}({', '.join(arguments)}) ({error}); change {key}.kwargs or the "
            "function's parameters"
        ) from error
    loaded: Callable[..., object] = function
    return loaded
