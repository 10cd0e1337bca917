"""Rules that a message keeps beyond the types of its fields, by the dataclass that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.convert.fields import FieldReader
from meshrl.wire.types import MessageSpan, Sample, VersionSpan


def _check_sample(sample: Sample, reader: FieldReader, path: str) -> None:
    """Arrays of one length, spans within it, and a version for each sampled token."""
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


CHECKS: Mapping[type, Callable[[Any, FieldReader, str], None]] = {Sample: _check_sample}
