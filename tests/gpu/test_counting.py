"""`rl` counts GPUs without torch, as torch counts them."""

import pytest
import torch

from meshrl.launch.gpus import visible

pytestmark = pytest.mark.gpu


def test_visible_gpus_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible({}) == tuple(map(str, range(torch.cuda.device_count())))
