"""Spares Python's garbage collector what a program loads once and keeps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Keeps the collector from what long imports load, while they load it and ever after: it would look through half a
    million objects, in half a second each time. Where all was imported before, nothing is hidden."""
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
    """Hides everything that exists from the collector. Blocks for 0.1 s, about 1 s where much was imported outside
    `loading`.

    A full collection waits until what survived since the last one is a quarter of what survived that one; the second
    collection here makes that a quarter of what is in use instead of a quarter of torch.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
