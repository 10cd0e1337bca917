"""Finds the rollouts for which the trainer refused a batch; used by the loop when it makes the batch anew.

The loop drops the rollouts at fault. What else was in the refused batch, and in those submitted after it, goes into
new batches, which new groups fill up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.orchestrator.work.screening import ReadyGroup
from meshrl.wire.errors import MeshError
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout

_ROW = re.compile(r"micro_batches\[(\d+)\]")


def at_fault(error: MeshError, submitted: SubmittedStep, *, vocab_size: int | None) -> frozenset[str]:
    """Ids of the rollouts to leave out; empty when the refusal is about the batch as a whole, its header for example.

    These are the rollouts that break a rule which is known here. If none does, they are all rollouts in the rows that
    the trainer's error names; if it names no row, all rollouts of the batch.

    `error`: the trainer's answer to the batch. `vocab_size`: the trainer's, None where it has not said.
    """
    assembled = submitted.assembled
    rollouts = [rollout for ready in submitted.groups for rollout in ready.kept]
    found = {rollout.rollout_id for rollout in rollouts if rollout_problems(rollout, vocab_size=vocab_size)}
    with np.errstate(over="ignore"):  # too large for the batch's float32 is what is looked for
        found |= {one for one, value in assembled.advantages.items() if not np.isfinite(np.float32(value))}
    if found:
        return frozenset(found)
    if not error.violations:
        return frozenset(rollout.rollout_id for rollout in rollouts)
    rows = [int(named[1]) for violation in error.violations if (named := _ROW.match(violation.field))]
    micro_batches = assembled.batch.micro_batches
    return frozenset(one for row in rows if row < len(micro_batches) for one in micro_batches[row].rollout_ids)


def split_groups(submitted: SubmittedStep, bad: AbstractSet[str]) -> Iterator[tuple[ReadyGroup, list[Rollout]]]:
    """Yields each group of a step with the rollouts of it that stay, and the list of those that are in `bad`."""
    for ready in submitted.groups:
        batched = [one for one in ready.kept if one.rollout_id not in submitted.assembled.untrainable]
        kept = tuple(one for one in batched if one.rollout_id not in bad)
        yield replace(ready, kept=kept), [one for one in batched if one.rollout_id in bad]
