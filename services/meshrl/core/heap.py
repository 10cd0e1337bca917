"""Keeps Python's garbage collector from what a program loads for good: the mains call it before and after they load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports that take seconds: leaves them a sixth less, since what they make stays and is no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded() -> None:
    """Takes everything that exists out of the collector's sight: modules, models, tasksets. Blocks for about a second.

    A full collection waits until what survived since the last one is a quarter of what survived that one. The second
    collection here makes that a quarter of what is in use, instead of a quarter of torch: garbage in reference cycles,
    which every rollout and request leaves, would pile up for hundreds of steps before it was looked for.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
