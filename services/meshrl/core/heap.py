"""Spares Python's garbage collector what a program loads once and keeps; called by the mains as they load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Keeps the collector from what long imports load, while they load it and ever after: little of it is garbage."""
    modules, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if collects:
            gc.enable()


def freeze_loaded() -> None:
    """Hides everything that exists from the collector: models, tasksets, and modules that did not come in `loading`.
    Blocks for 0.1 s, about 1 s where much was imported outside `loading`."""
    gc.collect()
    gc.freeze()
    gc.collect()
