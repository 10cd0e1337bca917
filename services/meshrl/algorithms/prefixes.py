"""Finds samples that begin alike, so that a row can hold their beginning once.

The rollouts of a group repeat its prompt, and the samples of one rollout may repeat its history. A sample shares the
first P tokens of another, its root, when both have them and no term of the objective has one of its own among them: its
loss would be lost. The root has all of its tokens.

The L other tokens of a sample cost L + attention * ((P + L)^2 - P^2) (see `balance`): they still see the prefix.

Shapes: T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.balance import sample_cost


@dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    token_ids: NDArray[np.int32]  # (T,)
    first_term: int  # index of the first token that a term of the objective has
    group: Hashable  # samples of different groups share nothing; None shares with none


@dataclass(frozen=True)
class Bundle:
    members: tuple[int, ...]  # indices of the samples, the root first
    prefixes: tuple[int, ...]  # tokens of the root that stand before each member's own; 0 for the root

    def tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths[index] - prefix for index, prefix in zip(self.members, self.prefixes, strict=True))

    def cost(self, lengths: Sequence[int]) -> float:
        return sum(
            sample_cost(lengths[index]) - sample_cost(prefix)
            for index, prefix in zip(self.members, self.prefixes, strict=True)
        )


def bundles(samples: Sequence[Beginning], *, max_tokens: int, parts: int, min_share: float) -> list[Bundle]:
    """Every sample in one bundle of at most max_tokens, alone if it shares nothing.

    A sample shares when the prefix is at least `min_share` of its tokens. A bundle too large for an even share of
    `parts` is divided, so that no rank trains a group that others wait for.
    """
    found: list[Bundle] = []
    roots: dict[Hashable, list[int]] = {}
    sharers: dict[int, list[tuple[int, int]]] = {}
    for index, sample in enumerate(samples):
        known = roots.setdefault(sample.group, []) if sample.group is not None else []
        context = sample.token_ids[: sample.first_term]
        prefix, root = max(((common_tokens(samples[one].token_ids, context), one) for one in known), default=(0, -1))
        if prefix > 0 and prefix >= min_share * len(sample.token_ids):
            sharers[root].append((prefix, index))
        else:
            known.append(index)
            sharers[index] = []
    lengths = [len(sample.token_ids) for sample in samples]
    for root, others in sharers.items():
        ordered = sorted(others, key=lambda other: (-other[0], other[1]))  # members of the same prefix see it together
        found.append(Bundle((root, *(index for _, index in ordered)), (0, *(prefix for prefix, _ in ordered))))
    limit = min(max_tokens, max(max(lengths), math.ceil(sum(one.tokens(lengths) for one in found) / parts)))
    return [part for bundle in found for part in _divided(bundle, lengths, limit)]


def common_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if len(different) else most


def _divided(bundle: Bundle, lengths: Sequence[int], limit: int) -> list[Bundle]:
    """Parts of at most `limit` tokens; each begins with a sample as its root.

    Members come by descending prefix.
    """
    parts: list[Bundle] = []
    members: list[int] = []
    prefixes: list[int] = []
    room = 0
    for index, prefix in zip(bundle.members, bundle.prefixes, strict=True):
        if not members or lengths[index] - prefix > room:
            if members:
                parts.append(Bundle(tuple(members), tuple(prefixes)))
            members, prefixes, room = [index], [0], limit - lengths[index]
            continue
        members.append(index)
        prefixes.append(prefix)
        room -= lengths[index] - prefix
    return [*parts, Bundle(tuple(members), tuple(prefixes))]
