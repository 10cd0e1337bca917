"""Samples are checked as they are read."""

import dataclasses

import numpy as np
import pytest

from meshrl.wire import convert
from meshrl.wire.errors import MeshError
from meshrl.wire.types import (
    MessageSpan,
    Sample,
    VersionSpan,
)


def make_sample(**changes):
    sample = Sample(
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, True, True, False]),
        logprobs=np.array([0.0, -0.5, -1.5, 0.0], dtype=np.float32),
        version_spans=(VersionSpan(start=1, end=2, version=3), VersionSpan(start=2, end=3, version=4)),
        message_spans=(MessageSpan(start=0, end=1, role="user"), MessageSpan(start=1, end=4, role="assistant")),
        temperature=0.7,
    )
    return dataclasses.replace(sample, **changes)


class TestSamples:
    def refuse(self, **changes):
        with pytest.raises(MeshError) as refused:
            convert.from_proto(Sample, convert.to_proto(make_sample(**changes)), "samples[0]")
        return [str(violation.field) for violation in refused.value.violations]

    def test_lengths_must_agree(self):
        assert self.refuse(loss_mask=np.zeros(3, dtype=bool), logprobs=np.zeros(5, dtype=np.float32)) == [
            "samples[0].loss_mask",
            "samples[0].logprobs",
        ]

    def test_every_sampled_token_needs_a_version(self):
        assert self.refuse(version_spans=(VersionSpan(start=1, end=2, version=3),)) == ["samples[0].version_spans"]

    @pytest.mark.parametrize("bounds", [((1, 3), (2, 4)), ((1, 9),), ((2, 3), (1, 2)), ((1, 1), (1, 3))])
    def test_spans_are_sorted_disjoint_and_within(self, bounds):
        spans = tuple(VersionSpan(start=start, end=end, version=1) for start, end in bounds)
        assert self.refuse(version_spans=spans) == ["samples[0].version_spans"]

    @pytest.mark.parametrize("content", [(0, 2), (1, 5), (3, 2), (1, None), (None, 2)])
    def test_the_content_of_a_message_is_within_it_and_has_both_ends(self, content):
        start, end = content
        span = MessageSpan(start=1, end=4, role="tool", content_start=start, content_end=end)
        assert self.refuse(message_spans=(span,)) == ["samples[0].message_spans[0]"]
