"""A batch that the trainer refuses for its content: which of its rollouts are at fault; asked by the loop.

The loop takes the batch apart, and those behind it: what is at fault is dropped, the rest is batched again, filled up
with new groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.orchestrator.work.screening import ReadyGroup
from meshrl.wire.errors import MeshError
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout

_ROW = re.compile(r"micro_batches\[(\d+)\]")


@dataclass(frozen=True, kw_only=True)
class BatchRefusal:
    """The trainer's word on the batch of a step."""

    step: int
    error: MeshError


def at_fault(refusal: BatchRefusal, submitted: SubmittedStep, *, vocab_size: int | None) -> frozenset[str]:
    """Ids of the rollouts to leave out; none when the refusal is about the batch as a whole, as of its header.

    Those are the rollouts that break a rule which is known here; if there are none, all in the rows that the trainer
    names; if it names nothing at all, all of the batch.
    """
    assembled = submitted.assembled
    rollouts = [rollout for ready in submitted.groups for rollout in ready.kept]
    found = {rollout.rollout_id for rollout in rollouts if rollout_problems(rollout, vocab_size=vocab_size)}
    with np.errstate(over="ignore"):  # too large for the batch's float32 is what is looked for
        found |= {one for one, value in assembled.advantages.items() if not np.isfinite(np.float32(value))}
    if found:
        return frozenset(found)
    if not refusal.error.violations:
        return frozenset(rollout.rollout_id for rollout in rollouts)
    rows = [int(named[1]) for violation in refusal.error.violations if (named := _ROW.match(violation.field))]
    micro_batches = assembled.batch.micro_batches
    return frozenset(one for row in rows if row < len(micro_batches) for one in micro_batches[row].rollout_ids)


def without(submitted: SubmittedStep, bad: AbstractSet[str]) -> Iterator[tuple[ReadyGroup, list[Rollout]]]:
    """Each group of a step with those of its rollouts that are left, and those of `bad` that are lost."""
    for ready in submitted.groups:
        batched = [one for one in ready.kept if one.rollout_id not in submitted.assembled.untrainable]
        kept = tuple(one for one in batched if one.rollout_id not in bad)
        yield replace(ready, kept=kept), [one for one in batched if one.rollout_id in bad]
