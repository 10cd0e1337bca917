"""Streams of an algorithm of the user's own that no batch can be made of."""

from typing import Any

import numpy as np
import pytest

from meshrl.algorithms.recipes.base import SampleStreams
from meshrl.algorithms.recipes.custom import check_streams
from meshrl.wire.types import Rollout, Sample

ONES, SHORT = np.ones(3, np.float32), np.ones(2, np.float32)
IDS = np.zeros((3, 2), np.int32)
SAMPLE = Sample(
    token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]), logprobs=-ONES, version_spans=()
)
ROLLOUT = Rollout(rollout_id="r", group_id="g", task_key="t", environment="e", samples=(SAMPLE,), reward=0.0)


@pytest.mark.parametrize(
    ("streams", "problem"),
    [
        ({"advantage": float("inf")}, "advantage inf is not a finite number"),
        ({"ce_weights": SHORT}, r"ce_weights must be 3 finite numbers, one a token of the sample, got shape \(2,\)"),
        ({"ce_weights": ONES * np.nan}, "ce_weights must be 3 finite numbers"),
        ({"ref_kl_weights": ONES}, "ref_kl_weights and ref_logprobs go together"),
        ({"ref_top_ids": IDS, "ref_top_logprobs": ONES}, "go together, with ref_kl_weights"),
        ({"ref_kl_weights": ONES, "ref_logprobs": ONES, "ref_top_ids": IDS}, "ref_top_ids and ref_top_logprobs go"),
        (
            {"ref_kl_weights": ONES, "ref_logprobs": ONES, "ref_top_ids": IDS, "ref_top_logprobs": ONES},
            r"must be \(3, K\), got shapes \(3, 2\) and \(3,\)",
        ),
        (
            {"ref_kl_weights": ONES, "ref_logprobs": ONES, "ref_top_ids": IDS, "ref_top_logprobs": IDS + np.nan},
            "ref_top_logprobs must be finite",
        ),
    ],
)
def test_streams_that_do_not_fit_are_named(streams: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"rollout r.*{problem}"):
        check_streams([ROLLOUT], {"r": [SampleStreams(**streams)]})


def test_each_sample_has_its_streams() -> None:
    check_streams([ROLLOUT], {"r": [SampleStreams(advantage=1.0)]})
    for streams in ({}, {"r": []}):
        with pytest.raises(ValueError, match=r"rollout r has 1 samples, but 0 streams; streams\(\) must give one"):
            check_streams([ROLLOUT], streams)
