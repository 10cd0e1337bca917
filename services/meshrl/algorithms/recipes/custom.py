"""custom: an algorithm of the user's own, named by its import path; its streams are checked before they are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.imports import load_function
from meshrl.algorithms.recipes.base import Recipe, SampleStreams, Streams
from meshrl.wire.types import Rollout, Sample


def load_recipe(import_path: str, kwargs: Mapping[str, object]) -> Recipe:
    """From `package.module.Class(**kwargs)`. Raises ValueError, which names the key."""
    made = load_function(import_path, kwargs, key="orchestrator.algo", positional=())(**kwargs)
    if not isinstance(made, Recipe):
        raise ValueError(
            f"orchestrator.algo.import_path {import_path!r} makes a {type(made).__name__}; name a subclass of"
            " meshrl.algorithms.recipes.base.Recipe"
        )
    return made


def check_streams(rollouts: Sequence[Rollout], streams: Streams) -> None:
    """Raises ValueError unless every sample has streams of its own length with finite numbers."""
    for rollout in rollouts:
        found = streams.get(rollout.rollout_id)
        if found is None or len(found) != len(rollout.samples):
            raise ValueError(
                f"rollout {rollout.rollout_id} has {len(rollout.samples)} samples, but"
                f" {0 if found is None else len(found)} streams; streams() must give one for each sample"
            )
        for sample, each in zip(rollout.samples, found, strict=True):
            _check(sample, each, f"rollout {rollout.rollout_id}")


def _check(sample: Sample, streams: SampleStreams, what: str) -> None:
    if streams.advantage is not None and not np.isfinite(np.float32(streams.advantage)):
        raise ValueError(f"{what}: advantage {streams.advantage} is not a finite number")
    if (streams.ref_kl_weights is None) != (streams.ref_logprobs is None):
        raise ValueError(f"{what}: ref_kl_weights and ref_logprobs go together; give both or neither")
    if streams.ref_top_ids is not None or streams.ref_top_logprobs is not None:
        ids, logprobs = streams.ref_top_ids, streams.ref_top_logprobs
        if ids is None or logprobs is None or streams.ref_kl_weights is None:
            raise ValueError(f"{what}: ref_top_ids and ref_top_logprobs go together, with ref_kl_weights")
        if ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != len(sample.token_ids):
            raise ValueError(
                f"{what}: ref_top_ids and ref_top_logprobs must be ({len(sample.token_ids)}, K), got shapes"
                f" {ids.shape} and {logprobs.shape}"
            )
        if not np.isfinite(logprobs).all():
            raise ValueError(f"{what}: ref_top_logprobs must be finite")
    arrays: dict[str, NDArray[np.float32] | None] = {
        name: getattr(streams, name) for name in ("ce_weights", "ref_kl_weights", "ref_logprobs")
    }
    for name, array in arrays.items():
        if array is None:
            continue
        if array.shape != (len(sample.token_ids),) or not np.isfinite(array).all():
            raise ValueError(
                f"{what}: {name} must be {len(sample.token_ids)} finite numbers, one a token of the sample, got shape"
                f" {array.shape}"
            )
