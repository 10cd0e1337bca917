"""Reads tensors and collects violations, so that one error names every bad field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.v1 import tensor_pb2
from meshrl.wire import tensors
from meshrl.wire.errors import FieldViolation, MeshError, invalid
from meshrl.wire.types import MessageSpan, Sample, VersionProbe, VersionSpan
from meshrl.wire.types.routes import Routes
from meshrl.wire.values import Array


class FieldReader:
    def __init__(self, what: str, prefix: str = "") -> None:
        self._what = what
        self._prefix = f"{prefix}." if prefix else ""
        self.violations: list[FieldViolation] = []

    def vector(self, tensor: tensor_pb2.Tensor, field: str, dtype: str, ndim: int = 1) -> Array:
        """Of `dtype` with `ndim` dimensions; empty if unreadable."""
        try:
            return tensors.decode(tensor, expect=dtype, ndim=ndim, field=self._prefix + field)
        except MeshError as error:  # collected: the caller gets all violations in one answer
            self.violations.extend(error.violations)
            return np.zeros((0,) * ndim, dtype=tensors.DTYPES[dtype].storage)

    def routes(self, tensor: tensor_pb2.Tensor, field: str) -> Routes:
        """(T, L, K), of one of their two types."""
        narrow = tensors.dtype_name(tensor.dtype) != "int16"
        return self.vector(tensor, field, "uint8" if narrow else "int16", ndim=3)

    def check(self, holds: bool, field: str, description: str) -> None:
        """Records a violation of `field` unless `holds`."""
        if not holds:
            self.violations.append(FieldViolation(self._prefix + field, description))

    def length(self, array: Array, field: str, expected: int, of: str) -> None:
        self.check(len(array) == expected, field, f"must have {expected} elements like {of}, got {len(array)}")

    @property
    def ok(self) -> bool:
        return not self.violations

    def done(self) -> None:
        """Raises MeshError INVALID_REQUEST if anything was wrong."""
        if self.violations:
            raise invalid(self.violations, self._what)


def _check_sample(sample: Sample, reader: FieldReader, path: str) -> None:
    num_tokens = len(sample.token_ids)
    reader.length(sample.loss_mask, f"{path}loss_mask", num_tokens, "token_ids")
    reader.length(sample.logprobs, f"{path}logprobs", num_tokens, "token_ids")
    if sample.routed_experts is not None:
        reader.length(sample.routed_experts, f"{path}routed_experts", num_tokens, "token_ids")
    if reader.ok:
        _check_version_spans(reader, sample.version_spans, sample.loss_mask, f"{path}version_spans")
    for place, span in enumerate(sample.message_spans):
        _check_content(reader, span, f"{path}message_spans[{place}]")


def _check_version_spans(
    reader: FieldReader, spans: tuple[VersionSpan, ...], loss_mask_T: NDArray[np.bool_], field: str
) -> None:
    covered_T = np.zeros(len(loss_mask_T), dtype=np.bool_)
    last_end = 0
    for span in spans:
        if not last_end <= span.start < span.end <= len(loss_mask_T):
            reader.check(False, field, f"[{span.start}, {span.end}) overlaps, is empty or passes the end")
            return
        covered_T[span.start : span.end] = True
        last_end = span.end
    covered = not spans or not bool((loss_mask_T & ~covered_T).any())
    reader.check(covered, field, "must cover every token of loss_mask, or be none at all")


def _check_content(reader: FieldReader, span: MessageSpan, field: str) -> None:
    start, end = span.content_start, span.content_end
    if start is None or end is None:
        reader.check(start is end, field, "needs content_start and content_end, or neither")
    else:
        within = span.start <= start <= end <= span.end
        reader.check(within, field, f"content [{start}, {end}) is not within the message [{span.start}, {span.end})")


def _check_probe(probe: VersionProbe, reader: FieldReader, path: str) -> None:
    tokens = len(probe.token_ids)
    reader.check(tokens >= 2, f"{path}token_ids", f"must have at least 2 elements, got {tokens}")
    reader.check(
        len(probe.logprobs) == tokens - 1,
        f"{path}logprobs",
        f"must have one element less than token_ids, {tokens - 1}, got {len(probe.logprobs)}",
    )


CHECKS: Mapping[type, Callable[[Any, FieldReader, str], None]] = {Sample: _check_sample, VersionProbe: _check_probe}
"""Rules beyond the types of fields, by the message's dataclass."""
