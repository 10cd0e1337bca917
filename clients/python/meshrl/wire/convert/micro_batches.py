"""The MicroBatch message, with every check. T tokens and S samples of a micro-batch, K candidates of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.convert.by_annotation import dtype_of, unwrapped
from meshrl.wire.convert.fields import FieldReader
from meshrl.wire.types import MicroBatch
from meshrl.wire.values import Array


def _tensors(*, may_be_unset: bool) -> Mapping[str, str]:
    """Element types by name, without routes, which may have two. The message decides which fields are tensors:
    annotations differ between releases of numpy."""
    hints = {name: unwrapped(hint) for name, hint in get_type_hints(MicroBatch).items()}
    tensor = pb.MicroBatch.DESCRIPTOR.fields_by_name["token_ids"].message_type
    return {
        name: dtype_of(kind)
        for name, (kind, optional) in hints.items()
        if pb.MicroBatch.DESCRIPTOR.fields_by_name[name].message_type is tensor
        and name != "routed_experts"
        and optional == may_be_unset
    }


TENSORS, OPTIONAL = _tensors(may_be_unset=False), _tensors(may_be_unset=True)
"""In the order of the fields, which is the digest's."""

_PER_TOKEN = ("position_ids", "loss_mask", "advantages", "inference_logprobs")
# Tensors that may be unset, of (T,), (S,) and (T, K).
_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
_PREFIXES = ("prefix_tokens", "prefix_samples")
_CANDIDATES = ("ref_top_ids", "ref_top_logprobs")


def micro_batch_to_proto(micro_batch: MicroBatch) -> pb.MicroBatch:
    """Raises ValueError for an array of another type than MicroBatch declares."""
    encoded: dict[str, Any] = {}
    for name, dtype in {**TENSORS, **OPTIONAL}.items():
        array = getattr(micro_batch, name)
        if array is None and name in OPTIONAL:
            continue
        if array.dtype.name != dtype:
            raise ValueError(f"MicroBatch.{name} must be {dtype}, got {array.dtype.name}")
        encoded[name] = tensors.encode(array)
    if micro_batch.routed_experts is not None:
        encoded["routed_experts"] = tensors.encode(micro_batch.routed_experts)
    return pb.MicroBatch(
        dp_rank=micro_batch.dp_rank,
        rollout_ids=micro_batch.rollout_ids,
        traceparents=micro_batch.traceparents,
        **encoded,
    )


def micro_batch_from_proto(
    message: pb.MicroBatch, *, num_environments: int | None = None, field: str = "micro_batch"
) -> MicroBatch:
    """Its arrays are read-only views.

    Raises MeshError INVALID_REQUEST with every tensor of a wrong type or length, offsets that do not increase from 0 to
    T, numbers that are not finite, ce or ref_kl weights at an unpredicted token, one without the other of two tensors
    that go together, candidates without ref_kl_weights, a prefix that no sample has, and an env_index outside
    `num_environments` if given.
    """
    reader = FieldReader("the micro-batch", field)
    arrays = {name: reader.vector(getattr(message, name), name, dtype) for name, dtype in TENSORS.items()}
    extra = {
        name: reader.vector(getattr(message, name), name, dtype, ndim=2 if name in _CANDIDATES else 1)
        for name, dtype in OPTIONAL.items()
        if message.HasField(name)
    }
    routes = reader.routes(message.routed_experts, "routed_experts") if message.HasField("routed_experts") else None
    if routes is not None:
        reader.length(routes, "routed_experts", len(arrays["token_ids"]), "token_ids")
    if reader.ok:
        _check_lengths(reader, arrays, len(message.rollout_ids), num_environments)
        _check_prefixes(reader, extra, arrays["sample_offsets"])
        _check_weights(reader, extra, arrays)
        _check_candidates(reader, extra, len(arrays["token_ids"]))
    reader.done()
    return MicroBatch(
        dp_rank=message.dp_rank,
        rollout_ids=tuple(message.rollout_ids),
        traceparents=tuple(message.traceparents),
        routed_experts=routes,
        **arrays,
        **extra,
    )


def _check_lengths(
    reader: FieldReader, arrays: Mapping[str, Array], num_rollout_ids: int, num_environments: int | None
) -> None:
    num_tokens, offsets = len(arrays["token_ids"]), arrays["sample_offsets"]
    reader.check(num_tokens > 0, "token_ids", "must not be empty")
    for name in _PER_TOKEN:
        reader.length(arrays[name], name, num_tokens, "token_ids")
    increasing = (
        len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == num_tokens and bool((np.diff(offsets) > 0).all())
    )
    reader.check(increasing, "sample_offsets", f"must increase from 0 to {num_tokens}, the number of tokens")
    num_samples = max(len(offsets) - 1, 0)
    for name in ("temperatures", "env_index"):
        reader.length(arrays[name], name, num_samples, "samples")
    reader.check(num_rollout_ids == num_samples, "rollout_ids", f"must have {num_samples} entries, one a sample")
    for name in ("advantages", "inference_logprobs"):
        reader.check(bool(np.isfinite(arrays[name]).all()), name, "must be finite")
    if num_environments is not None and len(arrays["env_index"]):
        known = arrays["env_index"].min() >= 0 and arrays["env_index"].max() < num_environments
        reader.check(bool(known), "env_index", f"must point into the header's {num_environments} environments")


def _check_prefixes(reader: FieldReader, extra: Mapping[str, Array], offsets: NDArray[np.int64]) -> None:
    found = [name for name in _PREFIXES if name in extra]
    if len(found) == 1:
        missing = _PREFIXES[0] if found[0] == _PREFIXES[1] else _PREFIXES[1]
        reader.check(False, missing, "must be set: prefix_tokens and prefix_samples come together or not at all")
    num_samples = max(len(offsets) - 1, 0)
    for name in found:
        reader.length(extra[name], name, num_samples, "samples")
    if len(found) < len(_PREFIXES) or not reader.ok:  # offsets may point anywhere
        return
    tokens, samples = extra["prefix_tokens"], extra["prefix_samples"]
    shares = tokens != 0
    reader.check(bool((tokens >= 0).all()), "prefix_tokens", "must not be negative")
    known = (samples[shares] >= 0) & (samples[shares] < num_samples)
    reader.check(bool(known.all()), "prefix_samples", f"must point to one of the row's {num_samples} samples")
    if not reader.ok:
        return
    reader.check(
        not shares[samples[shares]].any(), "prefix_samples", "must point to a sample that has no prefix of its own"
    )
    room = np.diff(offsets)[samples[shares]]
    reader.check(
        bool((tokens[shares] <= room).all()), "prefix_tokens", "must not be more tokens than the other sample has"
    )


def _check_weights(reader: FieldReader, extra: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    num_tokens, offsets = len(arrays["token_ids"]), arrays["sample_offsets"]
    weights = {name: extra[name] for name in _WEIGHTS if name in extra}
    for name, array in weights.items():
        reader.length(array, name, num_tokens, "token_ids")
        reader.check(bool(np.isfinite(array).all()), name, "must be finite")
    together = ("ref_kl_weights" in weights) == ("ref_logprobs" in weights)
    missing = "ref_logprobs" if "ref_kl_weights" in weights else "ref_kl_weights"
    reader.check(together, missing, "must be set: ref_kl_weights and ref_logprobs come together or not at all")
    if not reader.ok:  # offsets may point anywhere
        return
    starts, prefix_tokens = offsets[:-1], extra.get("prefix_tokens")
    unpredicted = starts if prefix_tokens is None else starts[prefix_tokens == 0]
    for name in ("ce_weights", "ref_kl_weights"):
        if name in weights:
            first = weights[name][unpredicted]
            reader.check(not first.any(), name, "must be 0 at the first token of a sample, which nothing predicts")


def _check_candidates(reader: FieldReader, extra: Mapping[str, Array], num_tokens: int) -> None:
    found = [name for name in _CANDIDATES if name in extra]
    if not found:
        return
    for name in {"ref_kl_weights", *_CANDIDATES} - extra.keys():
        reader.check(False, name, "must be set: candidates are those of ref_kl tokens, each with its logprob")
    for name in found:
        reader.length(extra[name], name, num_tokens, "token_ids")
    if not reader.ok:
        return
    ids, logprobs = extra["ref_top_ids"], extra["ref_top_logprobs"]
    same = ids.shape == logprobs.shape and ids.shape[1] > 0
    reader.check(same, "ref_top_logprobs", f"must have a column for each of ref_top_ids, got {logprobs.shape}")
    reader.check(bool(np.isfinite(logprobs).all()), "ref_top_logprobs", "must be finite")
    reader.check(bool((ids >= -1).all()), "ref_top_ids", "must be token ids, or -1 for none")
