"""Spares Python's garbage collector what a program loads once and keeps; called by the mains as they load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Switches the collector off around long imports, which makes them a sixth faster: little of theirs is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded() -> None:
    """Hides everything that exists from the collector: modules, models, tasksets. Blocks for about a second.

    A full collection waits until what survived since the last one is a quarter of what survived that one. The second
    collection here makes that a quarter of what is in use, instead of a quarter of torch: garbage in reference cycles,
    which every rollout and request leaves, would pile up for hundreds of steps before it was looked for.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
