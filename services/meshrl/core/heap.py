"""Tells Python's garbage collector what a program has loaded for good; called by the mains once they are ready."""

from __future__ import annotations

import gc


def freeze_loaded() -> None:
    """Takes everything that exists out of the collector's sight: modules, models, tasksets. Blocks for about a second.

    A full collection waits until what survived since the last one is a quarter of what survived that one. The second
    collection here makes that a quarter of what is in use, instead of a quarter of torch: garbage in reference cycles,
    which every rollout and request leaves, would pile up for hundreds of steps before it was looked for.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
